"""Objects that packages announce by entry points: listed without an import, loaded by name."""

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from fedtar_flare.core.errors import ConfigError

T = TypeVar("T")


@cache
def announced(kind: str) -> dict[str, EntryPoint]:
    """Entry points ``fedtar_flare.<kind>s`` by name; of one name this package's own counts, so it is never replaced."""
    points = entry_points(group=f"fedtar_flare.{kind}s")
    ours = {point.name: point for point in points if is_ours(point)}
    return ours | {point.name: point for point in sorted(points, key=str) if point.name not in ours}


def is_ours(point: EntryPoint) -> bool:
    """Whether this package announces it."""
    return point.dist is not None and point.dist.name.lower().replace("_", "-") == "fedtar-flare"


def package_of(kind: str, name: str) -> str:
    """Name and version of the package that announces an object."""
    dist = announced(kind)[name].dist
    return f"{dist.name} {dist.version}" if dist is not None else "unknown"


def load(kind: str, name: str, type_: type[T]) -> T:
    """Load an object; ConfigError where none, or something else, is announced under the name."""
    points = announced(kind)
    if name not in points:
        from fedtar_flare.core.settings import suggestion  # a list of names needs no settings

        known = ", ".join(points) or "none: install the package that has it with pip"
        raise ConfigError(f"{kind} '{name!s:.80}' is unknown{suggestion(str(name), points)} (known: {known})")
    whose = f"{kind} '{name}' of {package_of(kind, name)}"
    try:
        loaded = points[name].load()
    except Exception as error:
        raise ConfigError(f"{whose} cannot be loaded: {error}") from error
    if not isinstance(loaded, type_) or getattr(loaded, "name", None) != name:
        raise ConfigError(f"{whose}: {points[name].value} is no {type_.__name__} of that name")
    return loaded
