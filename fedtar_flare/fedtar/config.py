"""Settings of FedTAR at a site: one dataclass per concern, checked when built.

FLARE's component arguments stay primitive (dictionaries of numbers and words); :func:`build` turns one of them into
its dataclass and answers a wrong key with the nearest right one.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from datetime import datetime
from typing import Any, TypeVar

from fedtar_flare.errors import ConfigError

Config = TypeVar("Config")


@dataclass(frozen=True)
class LoRAConfig:
    """The shared low-rank adapter, the part that travels (FedTAR, Eq. 4: ``W + s A B^T`` with ``s = alpha / rank``)."""

    rank: int = field(default=4, metadata={"help": "rank r of the shared and of the patient's factors"})
    alpha: float = field(default=128.0, metadata={"help": "scale numerator: s = alpha / rank"})
    exchange: tuple[str, ...] = field(
        default=(), metadata={"help": "regular expressions of further parameters that are trained and exchanged whole"}
    )
    dtype_up: str = field(default="float32", metadata={"help": "number format of updates: float32 or bfloat16"})

    def __post_init__(self) -> None:
        object.__setattr__(self, "exchange", tuple(self.exchange))
        _require(self, rank=self.rank >= 1, alpha=self.alpha > 0, dtype_up=self.dtype_up in ("float32", "bfloat16"))


@dataclass(frozen=True)
class PatientConfig:
    """The patient-adaptive part, which never leaves the site (FedTAR, Eq. 2 to 4)."""

    enabled: bool = field(default=True, metadata={"help": "False: the shared adapter alone (an ablation)"})
    scale: float = field(default=1.0, metadata={"help": "s_p of Eq. 4; the paper's preset has alpha / rank"})
    components: int = field(default=16, metadata={"help": "components of the Gaussian mixture"})
    embedding_dim: int = field(default=32, metadata={"help": "width d of phi"})
    time_conditioned: bool = field(default=True, metadata={"help": "add a learned embedding of the time step to phi"})
    profile: tuple[str, ...] = field(
        default=("hash", "age", "sex"), metadata={"help": "fields of the profile; ('age', 'sex') leaves the hash out"}
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "profile", tuple(self.profile))
        _require(
            self,
            scale=self.scale > 0,
            components=self.components >= 1,
            embedding_dim=self.embedding_dim >= 1,
            profile=self.profile in (("hash", "age", "sex"), ("age", "sex")),
        )


@dataclass(frozen=True)
class TrainingConfig:
    """Local training at one time step (FedTAR, Algorithm 1)."""

    local_steps: int = field(default=12, metadata={"help": "optimiser updates per task"})
    batch_size: int = field(default=8, metadata={"help": "reports per update"})
    micro_batch: int = field(
        default=0, metadata={"help": "reports in memory at once, gradients added up over the batch; 0: the whole batch"}
    )
    lr_shared: float = field(default=1e-3, metadata={"help": "AdamW learning rate of the shared part"})
    lr_patient: float = field(default=1e-3, metadata={"help": "AdamW learning rate of the patient part"})
    weight_decay: float = field(default=0.01, metadata={"help": "AdamW weight decay of both"})
    augment: bool = field(
        default=False, metadata={"help": "small random changes of training images (MONAI; never mirrored)"}
    )
    max_grad_norm: float = field(default=1.0, metadata={"help": "gradient norm limit; 0 switches it off"})

    def __post_init__(self) -> None:
        _require(
            self,
            local_steps=self.local_steps >= 1,
            batch_size=self.batch_size >= 1,
            micro_batch=self.micro_batch >= 0,
            lr_shared=self.lr_shared > 0,
            lr_patient=self.lr_patient > 0,
            weight_decay=self.weight_decay >= 0,
            max_grad_norm=self.max_grad_norm >= 0,
        )


@dataclass(frozen=True)
class DataConfig:
    """How a site's visits become samples."""

    alignment: str = field(default="visit", metadata={"help": "time step by 'visit' number or by calendar 'period'"})
    periods: tuple[str, ...] = field(
        default=(), metadata={"help": "for 'period': T - 1 rising ISO dates, the bounds between the bins"}
    )
    prior: str = field(default="none", metadata={"help": "'none' (the paper) or 'report' of the visit before"})
    min_cell: int = field(default=1, metadata={"help": "fewest visits at a step to train on it and to report scores"})
    synthetic_patients: int = field(default=48, metadata={"help": "patients of a simulated site"})

    def __post_init__(self) -> None:
        object.__setattr__(self, "periods", tuple(self.periods))
        _require(
            self,
            periods=_rising_dates(self.periods),
            alignment=self.alignment in ("visit", "period"),
            prior=self.prior in ("none", "report"),
            min_cell=self.min_cell >= 1,
            synthetic_patients=self.synthetic_patients >= 1,
        )


def build(config: type[Config], values: Mapping[str, Any] | None, where: str) -> Config:
    """Build a settings dataclass from a dictionary.

    Args:
        config: the dataclass.
        values: its fields by name; None stands for the defaults.
        where: name of the argument, for messages.

    Raises:
        ConfigError: names an unknown key with the nearest known one, or the field whose value is not allowed.
    """
    assert is_dataclass(config)
    known = [f.name for f in fields(config)]
    for key in values or {}:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise ConfigError(f"{where}: unknown setting '{key}'{hint} (known: {', '.join(known)})")
    try:
        return config(**(values or {}))
    except TypeError as error:
        raise ConfigError(f"{where}: a value has the wrong type ({error})") from error


def digest(*configs: Any) -> str:
    """Short hash of settings that all sites must share."""
    text = json.dumps([asdict(config) for config in configs], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _rising_dates(texts: tuple[str, ...]) -> bool:
    try:
        dates = [datetime.fromisoformat(text) for text in texts]
    except (TypeError, ValueError):
        return False
    return dates == sorted(set(dates))


def _require(config: Any, **checks: bool) -> None:
    """Raise for the first field whose check is false, with its value and its help text."""
    helps = {f.name: f.metadata["help"] for f in fields(config)}
    for name, right in checks.items():
        if not right:
            raise ConfigError(
                f"{type(config).__name__}: {name} = {getattr(config, name)!r} is not allowed ({helps[name]})"
            )
