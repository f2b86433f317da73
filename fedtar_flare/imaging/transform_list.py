"""MONAI transforms that a study lead may add to the preparation of images (``data.transforms``).

The list is closed: none reads or writes a file, calls a function, names a path or a device, or makes an image larger
than the site's limits. Nothing here imports MONAI, so that settings are checked fast.
"""

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.settings import suggestion

Spec = Mapping[str, Any]  # ``{"name": "Spacingd", "pixdim": [1, 1, 2]}``
MOST = 16  # most transforms in one job


class Numbers(NamedTuple):
    """A number within bounds, or a list of ``least`` to ``most`` of them; whole ones where ``low`` is an ``int``."""

    low: float
    high: float
    most: int = 1
    least: int = 1

    def __str__(self) -> str:
        count = f"{self.least} to {self.most} numbers" if self.least < self.most else f"{self.most} number(s)"
        return f"{'whole ' if type(self.low) is int else ''}{count} from {self.low:g} to {self.high:g}"

    def allows(self, value: Any) -> bool:
        """Tell whether an argument may have this value."""
        items = value if isinstance(value, list | tuple) else [value]
        kinds = (int,) if type(self.low) is int else (int, float)
        within = all(type(item) in kinds and self.low <= item <= self.high for item in items)
        return within and self.least <= len(items) <= self.most


class Words(tuple[Any, ...]):
    """The allowed words, or yes and no."""

    def __str__(self) -> str:
        return f"one of {', '.join(map(str, self))}"

    def allows(self, value: Any) -> bool:
        """Tell whether an argument may have this value."""
        return any(type(value) is type(word) and value == word for word in self)


class Listed(NamedTuple):
    """A transform of the list; ``needed`` arguments have no default."""

    needed: Mapping[str, Numbers | Words]
    other: Mapping[str, Numbers | Words] = {}


_FLAG = Words((True, False))
_AXES = Words(("RAS", "LPS", "LAS", "RPS", "SPL"))
_BLEND = Words(("bilinear", "nearest"))
_BORDER = Words(("zeros", "border", "reflection"))
_HU = Numbers(-32768.0, 32767)
_PROB = {"prob": Numbers(0.0, 1)}
_SHARE = Numbers(-1.0, 1, 2)

DETERMINISTIC: dict[str, Listed] = {
    "Orientationd": Listed({"axcodes": _AXES}),
    "Spacingd": Listed({"pixdim": Numbers(0.2, 20, 3)}, {"mode": _BLEND}),  # mm between voxels
    "ScaleIntensityRanged": Listed({"a_min": _HU, "a_max": _HU, "b_min": _HU, "b_max": _HU}, {"clip": _FLAG}),
    "ThresholdIntensityd": Listed({"threshold": _HU}, {"above": _FLAG, "cval": _HU}),
    "GaussianSmoothd": Listed({"sigma": Numbers(0.0, 5, 3)}),  # voxels
    "CenterSpatialCropd": Listed({"roi_size": Numbers(16, 4096, 3)}),  # voxels
}
"""Applied to the image as it was read (a CT in HU), before slices are chosen."""
CT_ONLY = ("Orientationd", "Spacingd")  # a picture has no geometry, and would only be mirrored or stretched

_AFFINE: dict[str, Numbers | Words] = {"rotate_range": Numbers(0.0, 0.8), "translate_range": Numbers(0.0, 512, 2)}
_AFFINE |= {"shear_range": Numbers(0.0, 0.5, 2), "scale_range": Numbers(0.0, 0.5, 2)}
_AFFINE |= {"mode": _BLEND, "padding_mode": _BORDER}
RANDOM: dict[str, Listed] = {
    "RandAffined": Listed({}, _PROB | _AFFINE),  # in plane; radians and pixels
    "RandShiftIntensityd": Listed({"offsets": _SHARE}, _PROB),
    "RandScaleIntensityd": Listed({"factors": _SHARE}, _PROB),
    "RandAdjustContrastd": Listed({}, _PROB | {"gamma": Numbers(0.1, 10, 2, 2)}),
    "RandGaussianNoised": Listed({}, _PROB | {"mean": Numbers(-1.0, 1), "std": Numbers(0.0, 1)}),
    "RandGaussianSmoothd": Listed({}, _PROB | {"sigma_x": Numbers(0.0, 5, 2, 2), "sigma_y": Numbers(0.0, 5, 2, 2)}),
    "RandFlipd": Listed({}, _PROB | {"spatial_axis": Numbers(0, 1)}),  # left and right of a report are then wrong
}
"""Applied to the prepared image, values in [0, 1], all slices and channels alike; in training only."""

LISTED = DETERMINISTIC | RANDOM
SAFE = tuple(name for name in LISTED if name not in ("CenterSpatialCropd", "RandFlipd"))
"""The transforms that a site allows by default."""


def problem_of(specs: Sequence[Spec]) -> str | None:
    """Check transforms of a job."""
    if len(specs) > MOST:
        return f"at most {MOST} transforms"
    for spec in specs:
        name = spec.get("name") if isinstance(spec, Mapping) else spec
        if not isinstance(name, str) or name not in LISTED:
            return f"transforms of {', '.join(LISTED)}: not {name!r}{suggestion(str(name), LISTED)}"
        listed = LISTED[name]
        known = {**listed.needed, **listed.other}
        for argument, value in spec.items():
            if argument != "name" and argument not in known:
                return f"'{name}' with {', '.join(known)} only: not '{argument}'{suggestion(str(argument), known)}"
            if argument != "name" and not known[argument].allows(value):
                return f"'{name}' with a {argument} that is {known[argument]}: not {value!r}"
        if missing := [argument for argument in listed.needed if argument not in spec]:
            return f"'{name}' with {', '.join(missing)}"
    return None


def checked(specs: Sequence[Spec]) -> Sequence[Spec]:
    """Return ``specs``; raises :class:`ConfigError` where one cannot be added."""
    if problem := problem_of(specs):
        raise ConfigError(f"data: transforms must be {problem}")
    return specs


def split(spec: Spec) -> tuple[str, dict[str, Any]]:
    """Split a transform."""
    return spec["name"], {argument: value for argument, value in spec.items() if argument != "name"}


def names_of(specs: Sequence[Spec]) -> tuple[str, ...]:
    """List the names of transforms."""
    return tuple(dict.fromkeys(map(itemgetter("name"), specs)))


def deterministic(specs: Sequence[Spec]) -> list[Spec]:
    """Select the transforms of every preparation, in training, scoring and drafting; the cache's key has them."""
    return [spec for spec in specs if spec["name"] in DETERMINISTIC]


def random_for_training(specs: Sequence[Spec], *, augment: bool, image_size: int) -> list[Spec]:
    """Select the transforms that change training images."""
    return (built_in(image_size) if augment else []) + [spec for spec in specs if spec["name"] in RANDOM]


def built_in(image_size: int) -> list[Spec]:
    """Give the transforms of ``training.augment``: small changes, each with probability 0.8; nothing is mirrored."""
    affine = {"rotate_range": math.radians(5), "translate_range": [0.04 * image_size] * 2, "scale_range": [0.05] * 2}
    return [
        {"name": "RandAffined", "prob": 0.8, **affine, "mode": "bilinear", "padding_mode": "zeros"},
        {"name": "RandShiftIntensityd", "prob": 0.8, "offsets": 0.05},
        {"name": "RandAdjustContrastd", "prob": 0.8, "gamma": [0.9, 1.1]},
        {"name": "RandGaussianNoised", "prob": 0.8, "std": 0.02},
    ]
