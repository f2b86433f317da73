"""Results of a run at the server: the record, the scores, the adapter, the page and the closing box."""

import json
import logging
import platform
import statistics
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from fedtar_flare.core.errors import ExchangeError
from fedtar_flare.core.files import write_json
from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.models.adapters.peft_file import DEFAULT_ADAPTER, adapter_of, write_adapter
from fedtar_flare.protocol.contract import MOST
from fedtar_flare.protocol.exchange import ExchangeSchema, Tensors
from fedtar_flare.protocol.messages import Reply
from fedtar_flare.record.events import (
    CERTAINTIES,
    Ahead,
    Alarm,
    Evaluation,
    Exchange,
    Joined,
    Scores,
    SiteScores,
    SiteUpdate,
    SiteValidation,
    Start,
    Step,
    Validation,
)
from fedtar_flare.record.log import METRICS_FILE, RunRecord, best_round, raise_alarm, utc_now
from fedtar_flare.reporting.examples import EXAMPLES_FILE, EXAMPLES_FOLDER, read_examples
from fedtar_flare.reporting.run import Run, read_run
from fedtar_flare.reporting.verdict import closing_box
from fedtar_flare.runtime.exchange import Answers
from fedtar_flare.site.context import home
from fedtar_flare.version import __version__

logger = logging.getLogger(__name__)

MOST_FINDINGS = 100
"""Findings that a site's scores may hold."""
_OF_FINDING = {"n": MOST, "named": MOST, "recall": 1.0, "precision": 1.0}


def check_scores(reply: Reply, time_steps: int) -> None:
    """Refuse scores or counts that no site of T steps can have; the reply then holds :class:`SiteScores`."""
    for name in ("scores", "scores_generic"):
        if name not in reply.payload:
            continue
        sent = reply.payload[name] or {}
        try:
            scores = SiteScores.model_validate(sent)
        except ValidationError as error:
            raise ExchangeError(f"the field '{name}' does not hold scores per time step") from error
        of_findings = [part for findings in scores.findings.values() for part in findings.values()]
        parts = (*scores.steps.values(), scores.all, scores.references, *of_findings)
        known = {*sent} <= {*SiteScores.model_fields} and {*scores.findings} <= {"known", "new", "stated"}
        steps = all(1 <= t <= time_steps for t in scores.steps)
        known &= {*chain(*of_findings)} <= {*_OF_FINDING}
        if unknown := {*chain(*parts)} - {*_OF_FINDING, *SCORES}:
            text = f"'{min(unknown):.80}' is no score that the server knows: install its package there"
            raise ExchangeError(f"the field '{name}' holds more than the scores of {time_steps} time steps: {text}")
        if not (known and steps and len(of_findings) <= MOST_FINDINGS):
            raise ExchangeError(f"the field '{name}' holds more than the scores of {time_steps} time steps")
        counted = all(0 <= right <= n for n, right in scores.certainty.values())
        if not (counted and {*scores.certainty} <= {*CERTAINTIES}):
            raise ExchangeError(f"the field '{name}' has no counts of changes by certainty")
        for key, value in (pair for part in parts for pair in part.items()):
            most = _OF_FINDING.get(key) or SCORES[key].most
            if value is not None and not -1e-6 <= value <= most + 1e-6:
                raise ExchangeError(f"the field '{name}' has a {key} that is not within 0 to {most:g}")
        reply.payload[name] = scores if sent else {}
    for number in (reply.payload.get("skipped_studies") or {}).values():
        if not isinstance(number, int) or number < 0:
            raise ExchangeError("the field 'skipped_studies' is not numbers of studies by reason")


def _modalities(answers: Answers) -> list[str]:
    return sorted({str(of) for reply in answers.replies.values() if (of := reply.payload.get("modality"))})


class Results:
    """Writes ``<server run folder>/fedtar/`` as the run goes; ``run`` is the controller."""

    def __init__(self, run: Any):
        self.run, self.folder = run, run.results_folder
        self.record: RunRecord = run.record
        self.best: int | None = None
        """Best round so far, by validation loss."""
        self._adapter_config: dict[str, Any] = {}
        self._base_model: dict[str, Any] = {}
        self._validations: list[Validation] = []
        self._ahead: dict[int, dict[str, Scores]] = {}
        self._metrics: dict[str, Any] = {}
        self._first_round = 1
        self._idle: dict[str, str] | None = {}  # why sites added nothing; None once one did
        self._alarms: set[str] = set()

    def alarm(self, text: str) -> None:
        """Tell people once what they must look at: in the log, on the run's page and among the server's alarms."""
        if text not in self._alarms:
            self._alarms.add(text)
            self.record.write(Alarm(time=utc_now(), text=text))
            raise_alarm(Path(self.run.get_run_dir()).parent, text)

    def start(self, schema: ExchangeSchema, answers: Answers, **plan: Any) -> None:
        """Record who takes part, with what, after the handshake; ``plan`` has the fields of :class:`Start` to come."""
        replies = dict(sorted(answers.replies.items()))
        first = next(iter(replies.values()))
        model = dict(first.payload.get("model") or {})
        self._base_model = {
            "model": model.pop("config", {}),
            "fingerprint": model.get("fingerprint"),
            "modality": _modalities(answers),
            "prior": model.get("prior", "none"),
            **({"priors": model["priors"]} if "priors" in model else {}),
            **({"transforms": model.pop("transforms")} if "transforms" in model else {}),
            **({"extension": model["extension"]} if model.get("extension") else {}),
        }
        self._adapter_config = dict(first.payload.get("adapter_config") or {})
        self._first_round = plan["first_round"]
        self._metrics |= {name: plan[name] for name in ("method", "run_id", "rounds", "time_steps")}
        self.record.write(
            Start(
                **plan,
                time=utc_now(),
                min_cell=max(int(reply.numbers.get("min_cell", 1)) for reply in replies.values()),
                model=model,
                versions={"fedtar_flare": __version__, "torch": torch.__version__, "python": platform.python_version()},
                sites=list(replies),
                absent=answers.absent | answers.refused,
                counts={site: reply.payload["counts"] for site, reply in replies.items()},
                skipped_studies={site: reply.payload.get("skipped_studies") or {} for site, reply in replies.items()},
                exchange=Exchange(
                    tensors=len(schema.shapes),
                    parameters=schema.parameters,
                    bytes=4 * schema.parameters,
                    full_parameters=int(model.get("parameters") or 0),
                    full_bytes=4 * int(model.get("parameters") or 0),
                ),
            )
        )

    def joined(self, r: int, answers: Answers) -> None:
        """Record the sites that came in at the start of round r."""
        counts = {site: reply.payload["counts"] for site, reply in sorted(answers.replies.items())}
        self._base_model["modality"] = sorted({*self._base_model["modality"], *_modalities(answers)})
        self.record.write(Joined(round=r, sites=sorted(counts), counts=counts, absent=answers.absent | answers.refused))
        logger.info(f"round {r}: joined: {', '.join(sorted(counts)) or 'nobody'}")

    def step(self, r: int, t: int, answers: Answers, update_norm: float | None) -> None:
        """Record one exchange of updates: who sent what."""
        sites, losses = {}, []
        for site, reply in sorted(answers.replies.items()):
            more = {"bytes_up": answers.bytes_up[site], "late": r - reply.round}
            sites[site] = update = SiteUpdate.model_validate(reply.numbers | more)
            self.run.scalar(f"training loss at step {t}/{site}", update.train_loss, r)
            if update.train_loss is not None:
                losses.append(f"{site} {update.train_loss:.3f}")
        self.record.write(
            Step(
                round=r,
                step=t,
                update_norm=update_norm,
                skipped=not sites,
                sites=sites,
                abstained=answers.abstained,
                absent=answers.absent,
                refused=answers.refused,
                seconds=max(answers.seconds.values(), default=0.0),
                bytes_down=answers.bytes_down,
                bytes_up=sum(answers.bytes_up.values()),
            )
        )
        self._idle = None if sites or self._idle is None else self._idle | answers.missing
        answered = f"loss {' '.join(losses)}" if losses else f"answers of {', '.join(sites)}"
        logger.info(f"round {r}, step {t}: " + (answered if sites else "skipped, nobody had data"))

    def validation(self, r: int, answers: Answers) -> None:
        """Record the validation loss after round r, the mean over all sites' reports or the median of the sites."""
        sites = {
            site: SiteValidation(validation_loss=reply.numbers["validation_loss"], n=int(reply.numbers["reports"]))
            for site, reply in sorted(answers.replies.items())
            if "validation_loss" in reply.numbers
        }
        left_out = answers.missing | dict.fromkeys(set(answers.replies) - set(sites), "no validation patient")
        reports = sum(site.n for site in sites.values())
        total = sum((site.validation_loss or 0.0) * site.n for site in sites.values())
        loss, by_median = total / reports if reports else None, self.run.config.aggregation != "mean"
        if by_median and sites:
            loss = statistics.median(site.validation_loss or 0.0 for site in sites.values())
        event = Validation(round=r, loss=loss, sites=sites, left_out=left_out, by_median=by_median)
        self._validations.append(event)
        self._choose_best()
        self.record.write(event)
        self.run.scalar("validation loss/all sites", event.loss, r)
        for name, site in sites.items():
            self.run.scalar(f"validation loss/{name}", site.validation_loss, r)
        shown = "none (no validation patient)" if event.loss is None else f"{event.loss:.4f}"
        logger.info(f"round {r}: validation loss {shown}")

    def evaluation(self, r: int, answers: Answers, ahead: Collection[int] = ()) -> None:
        """Record the answers' scores, if any; those of the periods ``ahead``, yet unlearnt, also for the whole run."""
        replies = sorted(answers.replies.items())
        scores, generic = (
            {site: reply.payload[name] for site, reply in replies if reply.payload.get(name)}
            for name in ("scores", "scores_generic")
        )
        if not scores:
            return
        event = Evaluation.model_validate({"round": r, "sites": scores, "generic": generic})
        self.record.write(event)
        for t in ahead:
            if scored := {name: of.steps[t] for name, of in event.sites.items() if of.steps.get(t, {}).get("n")}:
                self._ahead[t] = self._ahead.get(t, {}) | scored
                self.record.write(Ahead(round=r, periods=self._ahead))
        for site, of_site in event.sites.items():
            for name, score in SCORES.items():
                if score.curve:
                    self.run.scalar(f"{name}/{site}", of_site.all.get(name), r)
        key = "final" if r >= self._first_round else "warm_start"
        if key == "final" or key not in self._metrics:
            self._metrics[key] = json.dumps(scores, default=dict)  # as text they take a quarter of the memory

    def nothing_learnt(self) -> str:
        """A sentence with each site's last reason, where no site had anything to add at any step; else empty."""
        if not self._idle:
            return ""
        reasons = "; ".join(f"{site}: {reason}" for site, reason in sorted(self._idle.items()))
        return f"No site learnt anything, so there is nothing new to use ({reasons})"

    def losses(self) -> dict[str, float | None]:
        """Validation loss by round."""
        return {str(event.round): event.loss for event in self._validations}

    def _choose_best(self) -> None:
        # rounds that are validated on visits of their own period cannot be compared
        by_period = self._validations and self.run.config.rounds_per_period
        newest = self._validations[-1].round if by_period else None
        self.best = newest or best_round(self._validations)

    def is_best(self, r: int) -> bool:
        """Whether round r is the best so far; without any validation patient the last round is."""
        return self.best in (None, r)

    def adapter(self, w: Tensors, r: int) -> None:
        """Write ``adapter/`` in PEFT's format, with what it belongs to; nothing where no adapter travels."""
        only_parameters = bool(w) and self._base_model.get("fingerprint") and not any(map(adapter_of, w))
        if not self._adapter_config and not only_parameters:
            return
        run = {name: self._metrics[name] for name in ("method", "run_id", "time_steps")} | {"round": r}
        run |= {"adapter": next((name for name in map(adapter_of, sorted(w)) if name), DEFAULT_ADAPTER)}
        info = {"format": 2, "fedtar_flare": __version__, **run, **self._base_model}
        write_adapter(self.folder / "adapter", w, self._adapter_config, info)

    def progress(self) -> dict[str, Any]:
        """What a resumed run must know of the rounds before."""
        validations = [event.model_dump() for event in self._validations]
        return {"validations": validations, "metrics": self._metrics, "ahead": self._ahead}

    def restore(self, info: Mapping[str, Any], comparable: bool = True) -> None:
        """Restore :meth:`progress`; losses only if ``comparable``, since visits of a new period change them."""
        entries = info.get("validations", ()) if comparable else ()
        self._validations = [Validation.model_validate(entry) for entry in entries]
        self._choose_best()
        self._idle = None  # of the rounds before it is not known
        self._metrics = dict(info.get("metrics", {}))
        self._ahead = {int(t): sites for t, sites in info.get("ahead", {}).items()}

    def finish(self, numbers: Mapping[str, list[float]]) -> None:
        """Write metrics (with the method's ``numbers``), model card and page, and log the box, if a run began."""
        if "run_id" not in self._metrics:
            return
        from fedtar_flare.reporting.model_card import write_model_card
        from fedtar_flare.reporting.page import write_report

        for path in _of_sites(self._metrics["run_id"], EXAMPLES_FILE):  # which a simulation keeps on this machine
            examples = read_examples(path)
            if examples.synthetic:
                shown = [asdict(replace(example, changes=())) for example in examples.examples]  # a site's own
                made = asdict(examples) | {"examples": shown}
                write_json(self.folder / EXAMPLES_FOLDER / f"{examples.site}.json", made)
        of_rounds = {"validation_loss": [event.loss for event in self._validations], "best_round": self.best}
        scores = {key: json.loads(self._metrics[key]) for key in ("warm_start", "final") if key in self._metrics}
        write_json(self.folder / METRICS_FILE, self._metrics | scores | of_rounds | {"numbers": dict(numbers)})
        run = read_run(self.folder)
        adapter = self.folder / "adapter"
        if adapter.is_dir():
            write_model_card(run, adapter)
        page = write_report(self.folder)
        logger.info("\n" + box(run, page))


def box(run: Run, page: Path) -> str:
    """Draw the closing box of a run."""
    paths = {"report": page}
    if (adapter := run.folder / "adapter").is_dir():
        paths["adapter"] = adapter
    for path in _of_sites(run.start.run_id, "*.html") if run.start.run_id else ():
        paths[f"{'phi' if path.stem == 'phi' else 'page'} of {path.parent.name}"] = path
    return closing_box(run, paths)


def _of_sites(run_id: str, name: str) -> list[Path]:
    """Files in the state of a run's sites, as far as they are on this machine."""
    return sorted((home() / "state" / run_id).glob(f"*/{name}"))
