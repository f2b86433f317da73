"""The site file: where this site's data lies, how it computes, and what a job may ask (``policy``).

It is the site's own, never the job's: a job can change none of it. :mod:`fedtar_flare.site.admission` compares a job's
request with the bounds. Which methods a site takes part in is not among them: its guard says so
(:mod:`fedtar_flare.site.policy`), before a task reaches any executor.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.core.files import located, yaml_mapping, yaml_text
from fedtar_flare.core.plugins import load
from fedtar_flare.core.settings import Settings, build, check_names, problem_of, suggestion
from fedtar_flare.data.sources import READERS
from fedtar_flare.imaging.limits import Limits
from fedtar_flare.imaging.transform_list import LISTED, SAFE
from fedtar_flare.metrics.score import Score
from fedtar_flare.site.context import home, state_of

SOURCES = ("synthetic", *READERS)
SITES_VARIABLE = "FEDTAR_SITES"
SITE_FILE = "fedtar.yaml"
NO_KEYS = ("origin", "simulated")
"""Fields of :class:`SiteConfig` that are no keys of the file."""


class Bounds(Settings):
    """Bounds on a job's request. The defaults are those of a site with patients; null takes an upper bound away."""

    approval: Literal["none", "required"] = Field("none", description="'required': jobs wait for 'fedtar site approve'")
    min_patients: int = Field(
        5, ge=1, description="fewest patients of a split at a step to learn from or to tell of, and behind an update"
    )
    min_local_steps: int = Field(4, ge=1, description="least training.local_steps, updates in one task")
    min_batch_size: int = Field(4, ge=1, description="least training.batch_size, reports in one update")
    min_gradient_scale: float = Field(
        0.1, ge=0, description="least training.max_grad_norm (0, no clipping, is allowed) and lora.alpha / lora.rank"
    )
    min_learning_rate: float = Field(
        1e-5, ge=0, description="least rate of anything trained: near 0, one model's losses could be asked again"
    )
    min_noise_multiplier: float = Field(
        0.0, ge=0, description="least training.noise_multiplier; above 0 only jobs with per-patient DP-SGD may come"
    )
    max_patient_epsilon: float | None = Field(
        None, gt=0, description="of per-patient DP-SGD at delta 1e-5, of all runs together; once spent no task trains"
    )
    max_learning_rate: float | None = Field(
        0.1, gt=0, description="greatest rate of anything trained, and of training.lr times training.weight_decay"
    )
    lora_targets: tuple[str, ...] = Field(
        ("*",),
        description="list of the layers that a job may adapt, by whole names with '*' for any text ('!' before a name "
        "takes it out); never the output layer or an embedding, whatever stands here",
    )
    transforms: tuple[str, ...] = Field(
        SAFE, description="MONAI transforms that a job may add to the preparation of images (data.transforms), by name"
    )
    max_rank: int | None = Field(64, ge=1, description="greatest lora.rank")
    max_parameters: int | None = Field(1_000_000_000, ge=1, description="of the model and all that a method adds")
    max_pixels: int | None = Field(1 << 24, ge=1, description="of a study as the model sees it: all slices")
    max_tokens: int | None = Field(1024, ge=1, description="of a report (max_length) or a study (slices x queries)")
    max_beams: int | None = Field(16, ge=1, description="greatest model.num_beams, and diagnosis.candidates")
    max_rounds: int | None = Field(200, ge=1, description="greatest number of rounds")
    max_time_steps: int | None = Field(20, ge=1, description="greatest number of time steps")
    max_seconds: float | None = Field(43_200.0, gt=0, description="of one task; one that takes longer is stopped")
    max_adapter_norm: float | None = Field(
        20.0, gt=0, description="greatest change of a layer by an adapter that comes down, over its weight (norms)"
    )
    max_answers: int | None = Field(
        4000, ge=1, description="training tasks answered, of all jobs on the data; the longest run allowed has 4000"
    )
    max_membership_auc: float | None = Field(
        None, ge=0, le=1, description="of an adapter, by 'fedtar site audit-model'; above it the site holds the release"
    )
    models: dict[str, Path | None] = Field(
        {},
        description="what else than the shipped model a job may name as model.encoder_name, decoder_name, tokenizer or "
        "weights, and the file or folder that it is here; without one, what the hub's cache on this machine has",
    )
    models_from: Literal["list", "hub", "anywhere"] = Field(
        "list",
        description="'list': only what 'models' names, and nothing is fetched; 'hub': what it names without a place "
        "may be fetched from the Hugging Face hub; 'anywhere': a job may name any model, path or hub name",
    )

    def looser(self) -> list[str]:
        """List the bounds that allow a job more than the defaults do."""
        looser = []
        for name, field in type(self).model_fields.items():
            value, usual = getattr(self, name), field.default
            more = name.startswith("max_") and usual is not None and (value is None or value > usual)
            less = name.startswith("min_") and value < usual
            further = name == "transforms" and not set(value) <= set(usual)
            if more or less or further or (name == "models_from" and value != usual):
                looser.append(name)
        return sorted(looser)

    def validation_errors(self) -> Iterator[tuple[str, str]]:
        for name in self.transforms:
            if name not in LISTED:
                yield "transforms", f"of {', '.join(LISTED)}: not '{name}'{suggestion(name, LISTED)}"
                break
        if problem := problem_of(self.lora_targets):
            yield "lora_targets", problem


def default_bounds(*, simulated: bool, synthetic: bool) -> dict[str, Any]:
    """Defaults other than those of :class:`Bounds`: no patient needs protection, or the job is the user's own."""
    differs: dict[str, Any] = {}
    if simulated or synthetic:
        differs = dict.fromkeys(("min_patients", "min_local_steps", "min_batch_size"), 1)
        differs |= {"min_gradient_scale": 0.0, "min_learning_rate": 0.0, "max_learning_rate": None}
    if simulated:
        differs |= {name: None for name in Bounds.model_fields if name.startswith("max_")}
        differs |= {"transforms": tuple(LISTED), "models_from": "anywhere"}
    return differs


class SiteConfig(Settings):
    """The content of a site file, plus ``origin`` and ``simulated``, which are no keys of the file."""

    source: str = Field(description=f"layout of the data: {', '.join(READERS)}; or synthetic, for phantoms")
    path: Path | None = Field(None, description="the manifest, or the folder of the source, from this file on")
    options: dict[str, Any] = Field({}, description="further settings of the source")
    cache_dir: Path | None = Field(
        None, description="folder of prepared images and features; default $FEDTAR_HOME or ~/.cache/fedtar_flare"
    )
    state_dir: Path | None = Field(
        None, description="folder of the site's state; default: KIT.fedtar_state beside the kit (simulator: the cache)"
    )
    device: str = Field("auto", description="where the site computes: auto, cpu, cuda or cuda:<i>")
    precision: Literal["auto", "float32", "bfloat16"] = Field("auto", description="number format of the computation")
    lora_rank: int | None = Field(
        None,
        ge=1,
        description="greatest rank of the adapter here: of a job with a larger lora.rank, the site has the first so "
        "many rows of A and columns of B, and its patients' adapters have this rank; default: the job's",
    )
    processes: int = Field(1, ge=1, le=64, description="how many processes do a task together, each with a GPU if any")
    labeler: Path | None = Field(
        None, description="folder of 'fedtar labeler import' (CheXbert, RadBERT), by which scores then leave too"
    )
    scores: tuple[str, ...] = Field((), description="scores of other packages, by name, that are computed and leave")
    candidates: dict[str, Path] = Field(
        {},
        description="what the names in a job of method evaluate are here: an adapter folder, a base model's weights "
        "(.safetensors) or 'vlm' folder, or drafts by visit id (.csv, .json, .jsonl)",
    )
    exclude: Path | None = Field(None, description="text file of ids, one a line, of patients who withdrew")
    canaries: int = Field(
        0, ge=0, le=16, description="made-up patients to train on too, for a trial: an audit tells what is remembered"
    )
    retention_days: int | None = Field(
        None,
        ge=1,
        description="days after which unused state of runs and folders of jobs are deleted; "
        "default: only what a resume needs, 14 days after a run ended well",
    )
    limits: Limits = Field(default_factory=Limits, strict=False, description="the largest study, and the longest time")
    policy: Bounds = Field(
        default_factory=Bounds,
        strict=False,
        description="what a job may ask; looser by default in a simulation and for synthetic data",
    )
    syslog: str | None = Field(
        None, description="where each audit line's digest is sent too: a socket (/dev/log) or <host>:<port> (UDP)"
    )
    shares: tuple[Literal["features"], ...] | None = Field(
        None,
        description="what leaves beyond a method's own messages: 'features', rows of image features, each a mean over "
        "at least 5 training patients, which go on to the other hospitals (fedmrg); default: these from a simulated "
        "site or a synthetic cohort, else nothing",
    )
    origin: Path | None = Field(None, description="which file this was read from")
    simulated: bool = Field(False, description="simulation: the key is derived, so that patients' splits repeat")

    @property
    def without_patients(self) -> bool:
        """Whether the site is simulated or its data invented."""
        return self.simulated or self.source == "synthetic"

    @property
    def shares_features(self) -> bool:
        """Whether rows of image features may leave."""
        return self.without_patients if self.shares is None else bool(self.shares)

    def validation_errors(self) -> Iterator[tuple[str, str]]:
        if self.source not in SOURCES:
            yield "source", f"one of {', '.join(SOURCES)}{suggestion(self.source, SOURCES)}"
        if self.source != "synthetic" and self.path is None:
            yield "path", f"given, as source '{self.source}' needs a path"
        if self.syslog is not None and not re.fullmatch(r"/.+|[^/\s]+:\d{1,5}", self.syslog):
            yield "syslog", "the path of a socket, or host:port"
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            yield "device", "auto, cpu, cuda or cuda:<i>"
        if self.processes > 1 and self.device.startswith("cuda:"):
            yield "processes", f"1 with device: {self.device}, which is one GPU; several take cuda:0, cuda:1 and so on"


def load_site_config(site_name: str, *, workspace: Path | None, simulator: bool) -> SiteConfig:
    """Read a site's file: ``<site>.yaml`` in FEDTAR_SITES, else ``local/fedtar.yaml`` in the FLARE workspace.

    Without one the simulator takes the synthetic cohort, but not among sites with files: a name may be misspelt.
    """
    folder = sites_folder()
    files = [folder / f"{site_name}.yaml"] if folder else []
    files += [workspace / "local" / SITE_FILE] if workspace is not None else []
    for file in files:
        if file.is_file():
            return read_site_file(file, simulated=simulator)
    if simulator and folder:
        names = ", ".join(sorted(file.name for file in folder.glob("*.yaml"))) or "none"
        text = f"site {site_name}: {SITES_VARIABLE} names {folder}, which has no {site_name}.yaml (there: {names})"
        text += f". Write it ('source: synthetic' for phantoms), or unset {SITES_VARIABLE}"
        raise ConfigError(text, public=f"the site has no file in the folder that {SITES_VARIABLE} names")
    if simulator:
        policy = Bounds(**default_bounds(simulated=True, synthetic=True))
        return SiteConfig(source="synthetic", simulated=True, policy=policy)
    missing = files[-1] if files else SITE_FILE
    text = f"site {site_name} has no site file: 'fedtar init -o {missing}' writes one with 'source: manifest'"
    raise ConfigError(text, public="the site has no site file (local/fedtar.yaml)")


def sites_folder() -> Path | None:
    """Find the folder of simulated sites' files."""
    named = os.environ.get(SITES_VARIABLE)
    if not named:
        return None
    folder = Path(named).expanduser()
    started = Path(os.environ.get("PWD", ".")) / folder
    return folder if folder.is_dir() or not started.is_dir() else started


def read_site_file(file: Path, simulated: bool = False, for_jobs: bool = True) -> SiteConfig:
    """Read one site file; relative paths in it start at its folder."""
    text = yaml_text(file)
    content = yaml_mapping(text, str(file), "'key: value' lines, at least 'source: ...'")
    check_names(content, [name for name in SiteConfig.model_fields if name not in NO_KEYS], str(file))
    content = {key: value for key, value in content.items() if value is not None}
    whole = "policy" in content and text.rstrip().endswith("\n...")
    for key in ("path", "cache_dir", "state_dir", "labeler", "exclude"):
        if key in content:
            content[key] = located(file.parent, str(content[key]))
    if isinstance(candidates := content.get("candidates"), dict):
        content["candidates"] = {name: located(file.parent, str(to)) for name, to in candidates.items()}
    if "limits" in content:
        content["limits"] = build(Limits, content["limits"], f"{file}: limits")
    policy = content.get("policy", {})
    if isinstance(policy, dict):
        if isinstance(models := policy.get("models"), dict):
            folders = {name: path and located(file.parent, str(path)) for name, path in models.items()}
            policy = policy | {"models": folders}
        policy = default_bounds(simulated=simulated, synthetic=content.get("source") == "synthetic") | policy
    content["policy"] = build(Bounds, policy, f"{file}: policy")
    config = build(SiteConfig, {**content, "origin": file, "simulated": simulated}, str(file))
    if config.source != "synthetic" and config.path and not config.path.exists():
        raise ConfigError(f"{file}: path {config.path} is not there", public="the site's data is not at its path")
    if config.labeler is not None:
        from fedtar_flare.learning.report_labeler import ReportLabeler

        ReportLabeler(config.labeler)
    for name in config.scores:
        load("score", name, Score)  # what cannot be loaded now cannot be when scores are due
    if for_jobs and not (whole or config.without_patients):
        text = f"{file}: with patients it must have a 'policy' (policy: {{}} for the defaults), and '...' as its last "
        text += "line, the end of a YAML document, so that a file that was cut short is noticed"
        raise ConfigError(text, public="the site's file has no policy, or was cut short")
    return config


def cache_folder(config: SiteConfig) -> Path:
    """Find the folder of prepared images and of the synthetic cohort."""
    return config.cache_dir or home()


def state_folder(kit: Path | None, config: SiteConfig | None) -> Path | None:
    """Folder of the state of runs at the site of this kit and site file; None where neither is known."""
    return (config and config.state_dir) or (kit and state_of(kit))
