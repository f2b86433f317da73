"""What stays at a site between tasks: versions of its private state on disk, keyed by run and site.

In the simulator every task is a new process, so the disk is the only memory. A version is one ``safetensors`` file with
its own JSON inside, renamed into place: a killed process leaves the old version or the new one, never half of one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedtar_flare.errors import ConfigError
from fedtar_flare.files import PRIVATE, read_json, write_json
from fedtar_flare.tensor_file import StateError, read_tensors, write_tensors

ANSWERED = "tasks.json"
"""Which tasks the site has answered in the run."""

_VERSION = re.compile(r"^(\d{4})-(\d{2})$")
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,127}$")


class SiteState:
    """Versions of one site's state in one run: ``<root>/<run_id>/<site>/<round>-<step>.safetensors``.

    ``root`` lies outside of FLARE's run folder; the server makes ``run_id`` and its checkpoints carry it.
    ``keep_rounds`` rounds before the running one keep their last version, so that a run can be resumed from the
    checkpoint before the last.
    """

    def __init__(self, root: Path | str, run_id: str, site: str, keep_rounds: int = 3):
        for what, name in (("run_id", run_id), ("site", site)):
            if not _NAME.match(name):
                raise ConfigError(f"{what} '{name}' cannot name a folder: letters, digits, '.', '_', '@', '-' only")
        if keep_rounds < 1:
            raise ConfigError(f"keep_rounds must be at least 1, not {keep_rounds}")
        self.folder = Path(root) / run_id / site
        self.keep_rounds = keep_rounds

    def save(self, version: str, tensors: Mapping[str, torch.Tensor], info: Mapping[str, Any], keep: str = "") -> None:
        """Write the version ``<round>-<step>`` atomically and prune old ones, but not ``keep`` (the best round's)."""
        if not _VERSION.match(version):
            raise ConfigError(f"state version '{version}' is not of the form 0001-02")
        self.write(version, tensors, info)
        self._prune(version, keep)

    def latest(self, not_after: str) -> str | None:
        """The newest version that is not later than ``not_after``; None when there is none."""
        return max((v for v in self.versions() if v <= not_after), default=None)

    def versions(self) -> list[str]:
        """All versions on disk, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(path.stem for path in self.folder.glob("*.safetensors") if _VERSION.match(path.stem))

    def write(self, name: str, tensors: Mapping[str, torch.Tensor], info: Mapping[str, Any]) -> None:
        """Write ``<name>.safetensors`` atomically, with ``info`` (JSON) inside."""
        self.folder.mkdir(parents=True, exist_ok=True)
        os.chmod(self.folder, 0o700)  # noqa: PTH101 - private to the account that runs the site
        write_tensors(self.folder / f"{name}.safetensors", tensors, info)

    def read(self, name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Read what :meth:`write` or :meth:`save` wrote. Raises StateError if it is missing or damaged."""
        return read_tensors(self.folder / f"{name}.safetensors")

    def has(self, name: str) -> bool:
        return (self.folder / f"{name}.safetensors").is_file()

    def names(self, prefix: str) -> list[str]:
        """Names of the files that begin with ``prefix``, sorted."""
        return sorted(path.stem for path in self.folder.glob(f"{prefix}*.safetensors"))

    def remove(self, name: str) -> None:
        (self.folder / f"{name}.safetensors").unlink(missing_ok=True)

    def answered(self) -> dict[str, str]:
        """Tasks that the site has answered in this run, each with the version that names its last round and step.

        Raises StateError if the record is damaged.
        """
        if not (file := self.folder / ANSWERED).is_file():
            return {}
        try:
            return read_json(file)
        except ConfigError as error:
            raise StateError(str(error)) from error

    def add_answered(self, task: str, version: str) -> None:
        """Record that the site has answered a task of this round and step."""
        write_json(self.folder / ANSWERED, self.answered() | {task: version}, PRIVATE)

    def _prune(self, current: str, keep: str) -> None:
        """Keep the running round's last two versions and the last one of each of ``keep_rounds`` rounds before."""
        versions = [v for v in self.versions() if v <= current]
        rounds = sorted({v[:4] for v in versions})
        kept = set(versions[-2:])
        kept |= {max(v for v in versions if v[:4] == r) for r in rounds[-1 - self.keep_rounds :]}
        kept |= {max((v for v in versions if v <= keep), default="")} if keep else set()
        for v in set(versions) - kept:
            self.remove(v)
