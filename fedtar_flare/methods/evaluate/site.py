"""The method ``evaluate`` at a site: what a candidate means here, its drafts, and the sums that leave."""

import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedtar_flare.core.errors import ConfigError, FedTARError
from fedtar_flare.core.files import checksum
from fedtar_flare.data.cohort import Sample, Split
from fedtar_flare.data.draft_files import read_texts
from fedtar_flare.data.minimum_cell import full_cells
from fedtar_flare.learning.config import DataConfig
from fedtar_flare.learning.drafting import Drafter, base_config, require_modality
from fedtar_flare.learning.evaluation import report_rows, reports_of, site_scores, write_report_scores
from fedtar_flare.learning.learner import ReportLearner
from fedtar_flare.learning.site_model import SiteModel
from fedtar_flare.metrics.paired_sums import guarded_sums, ratio_sums
from fedtar_flare.models.adapters.peft_file import ADAPTER_INFO, read_adapter_info
from fedtar_flare.models.config import ModelConfig
from fedtar_flare.protocol.contract import HANDSHAKE
from fedtar_flare.protocol.messages import abstain, ok
from fedtar_flare.runtime.report_site import ReportSite
from fedtar_flare.runtime.requirements import AdaptedModel
from fedtar_flare.runtime.site_learner import build_learner
from fedtar_flare.runtime.task import Answer, Handler, Task, require_exchange
from fedtar_flare.site.cohort import prepare_site
from fedtar_flare.site.job_records import may_score_drafts

VALIDATE = "validate"
"""FLARE's name of the task."""
JOB = "job"
"""The candidate that is the job's own model with the weights that the job carries."""
STATUSES = (SCORED, NOT_HERE, WITHHELD) = ("scored", "not-here", "withheld")
TABLES = (".csv", ".json", ".jsonl")
Drafts = Mapping[str, str]
"""Texts by visit id."""


class EvaluateSite(ReportSite):
    """Scores candidates at a site; arguments as :class:`.ReportSite`."""

    def handlers(self) -> Mapping[str, Handler]:
        return {HANDSHAKE: self._greet, VALIDATE: self._validate}

    def learner_settings(self, task: Task) -> dict[str, Any]:
        return {}

    def _greet(self, task: Task) -> Answer:
        """The handshake, in which nothing is scored."""
        return self._handshake(replace(task, header=replace(task.header, evaluate=False)))

    def _validate(self, task: Task) -> Answer:
        least = task.min_cell
        # 1. The visits: those of a time step with too few patients never count. A run asks of one set of weights.
        require_exchange(task)
        if not task.state.may_answer(VALIDATE, checksum(task.weights), task.cohort.digest()):
            return abstain(task.header, "candidates were scored already, with other weights or patients"), None
        samples = task.cohort.samples(_split(task))
        full = full_cells([(sample.time_step, sample.visit.patient_id) for sample in samples], least)
        samples = [sample for sample in samples if sample.time_step in full]
        if not samples:
            return abstain(task.header, f"no time step with {least} test patients"), None
        # 2. Each candidate's drafts, unless at some step they differ from earlier ones in fewer patients' than a cell.
        found, scored = dict[str, str](), list[list[str]]()
        for name, place in self.settings.evaluate.candidates.items():
            task.site.stop_if_aborted()
            drafts = self._drafts(task, name, place)
            if drafts is None:
                found[name] = NOT_HERE
                continue
            if lacking := [sample.visit.visit_id for sample in samples if sample.visit.visit_id not in drafts]:
                raise _unusable(name, f"there is no draft of test visit '{lacking[0]}' and {len(lacking) - 1} others")
            texts = [drafts[sample.visit.visit_id] for sample in samples]
            marks = _marks(task.cohort.key, samples, texts)
            found[name] = WITHHELD
            if may_score_drafts(task.site.records, str(task.config.path), marks, least):
                found[name] = SCORED
                scored.append(texts)
        if not scored:
            return ok(task.header, payload={"candidates": found}), None
        # 3. What leaves: sums of all candidates, and the usual scores of the first. Single reports' stay.
        unknown = [0.0] * len(samples)  # token losses, which only some candidates have
        sums = [ratio_sums(reports_of(samples, texts, unknown, range(len(samples)), least)) for texts in scored]
        known = [score for score in sums[0] if all(score in of for of in sums)]
        guarded = {score: guarded_sums(score, [of[score] for of in sums], len(samples), least) for score in known}
        scores = site_scores(samples, scored[0], unknown, task.header.time_steps, least, admitted=task.config.scores)
        rows = report_rows(samples, scored[0], unknown, personal=True)
        for part in (*scores["steps"].values(), scores["all"], *rows):
            part.pop("token_loss", None)
        if not task.ranks.rank:
            write_report_scores(task.state.folder, task.header.round, rows)
        return ok(task.header, payload={"candidates": found, "sums": guarded, "scores": scores}), None

    # ------------------------------------------------------------------ what a candidate writes
    def _drafts(self, task: Task, name: str, place: str) -> Drafts | None:
        """A candidate's drafts for the site's test visits; None where the site has none of the name."""
        if place and not task.site.simulated:
            text = "a job's paths of candidates are for simulations: a hospital's site file says what a name means"
            raise ConfigError(text, public=text)
        path = Path(place) if place else task.config.candidates.get(name)
        if path is None and name != JOB:
            return None
        try:
            if path is None:
                return self._written(task, self._learner_of(task), self.settings.model, self.settings.data)
            if path.suffix.lower() in TABLES:
                return {visit: of.text for visit, of in read_texts(path, "draft").items()}
            return self._by_adapter(task, path) if (path / ADAPTER_INFO).is_file() else self._by_base(task, path)
        except (FedTARError, OSError) as error:
            raise _unusable(name, f"{path}: {error}") from error

    def _by_adapter(self, task: Task, folder: Path) -> Drafts:
        """Drafts by an adapter on the base model that it names, as at a hospital outside its run."""
        info = read_adapter_info(folder)
        require_modality(info, task.cohort.modality)
        config = base_config(info, None)
        located = config.with_local_paths(task.config.policy.models)
        named = {setting: getattr(located, setting) for setting in config.named}
        model = Drafter(folder, model=named, device=task.config.device).site_model
        shown = {"prior": info.get("prior", "none"), "priors": info.get("priors", 1)}
        data = self.settings.data.replace(**shown, transforms=tuple(info.get("transforms", ())))
        return self._written(task, model, config, data)

    def _by_base(self, task: Task, path: Path) -> Drafts:
        """Drafts by a base model in place of the job's: the weights of its parts, or the folder of a 'vlm'."""
        if path.is_dir() and self.settings.model.family != "vlm":
            raise ConfigError(f"it has no {ADAPTER_INFO}; the folder of a base model needs a job with a 'vlm'")
        config = self.settings.model.replace(**{"decoder_name" if path.is_dir() else "weights": str(path)})
        of_base = replace(task, settings=task.settings.replace(model=config))
        model = build_learner(ReportLearner, of_base, task.cohort, AdaptedModel(config, self.lora))
        return self._written(task, model, config, self.settings.data)

    def _written(self, task: Task, model: SiteModel, config: ModelConfig, data: DataConfig) -> Drafts:
        """Drafts by a model, for images as it takes them."""
        cohort, _ = prepare_site(
            task.config,
            task.site.name,
            model=config,
            data=data,
            time_steps=task.header.time_steps,
            seed=self.seed,
            workspace=task.site.workspace,
        )
        model.cohort, model.checkpoint = cohort, task.site.stop_if_aborted
        done = model.evaluate(task.min_cell, _split(task), generic=False)
        return {sample.visit.visit_id: text for sample, text in zip(done.samples, done.texts, strict=True)}


def _split(task: Task) -> Split | None:
    return "test" if task.header.score == "test" else None


def _marks(key: bytes, samples: Sequence[Sample], texts: Sequence[str]) -> set[str]:
    """A keyed digest of each patient's visits at a time step, references and drafts, behind the number of the step."""
    parts: dict[tuple[int, str], list[str]] = {}
    for sample, text in zip(samples, texts, strict=True):
        visit = sample.visit
        row = json.dumps([visit.patient_id, visit.visit_id, visit.report, text])
        parts.setdefault((sample.time_step, visit.patient_id), ["drafts"]).append(row)
    digests = {of: hmac.digest(key, "\n".join(sorted(rows)).encode(), "sha256").hex() for of, rows in parts.items()}
    return {f"{step} {digest[:32]}" for (step, _), digest in digests.items()}


def _unusable(name: str, why: str) -> ConfigError:
    public = f"candidate '{name}' cannot be scored at the site, whose own log says why"
    return ConfigError(f"candidate '{name}': {why}", public=public)
