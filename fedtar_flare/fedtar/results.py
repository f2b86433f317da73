"""What a run leaves behind at the server: the record, the scores, the adapter, the page and the closing table."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedtar_flare.flare.controller import Answers, Tensors, now
from fedtar_flare.flare.executor import home
from fedtar_flare.metrics.registry import SCORES
from fedtar_flare.models.adapters.peft_file import write_adapter
from fedtar_flare.record.log import METRICS_FILE, RunRecord, write_json
from fedtar_flare.reporting.examples import EXAMPLES_FILE, EXAMPLES_FOLDER, read_examples
from fedtar_flare.version import __version__

if TYPE_CHECKING:
    from fedtar_flare.fedtar.controller import TemporalResidualController

logger = logging.getLogger(__name__)


class ResultsWriter:
    """Writes ``<server run folder>/fedtar/`` as the run goes.

    Args:
        folder: that folder.
        record: its run record.
        scalar: takes points of curves (tag, value, place) for TensorBoard.
    """

    def __init__(
        self, folder: Path, record: RunRecord, scalar: Callable[[str, float | None, int], None] = lambda *point: None
    ):
        self.folder = folder
        self._scalar = scalar
        self.record = record
        self._adapter_config: dict[str, Any] = {}
        self._base_model: dict[str, Any] = {}
        self._losses: dict[int, float] = {}
        self._metrics: dict[str, Any] = {}
        self._bytes_down = 0

    def start(self, controller: TemporalResidualController, answers: Answers) -> None:
        """After the handshake: who takes part with what, and the scores of the start."""
        schema = controller.schema
        first = next(iter(answers.replies.values()))
        model = dict(first.payload.get("model") or {})
        self._base_model = {"model": model.pop("config", {}), "fingerprint": model.get("fingerprint")}
        self._adapter_config = dict(first.payload.get("adapter_config") or {})
        self._bytes_down = 4 * schema.parameters
        self._metrics |= {
            "run_id": controller.run_id,
            "rounds": controller.num_rounds,
            "time_steps": controller.time_steps,
        }
        self.record.write(
            "start",
            run_id=controller.run_id,
            time=now(),
            settings=controller.settings()
            | {
                "min_sites": controller.min_sites,
                "min_cell": max(int(reply.payload.get("min_cell") or 1) for reply in answers.replies.values()),
                "model": model,
            },
            versions={"fedtar_flare": __version__, "torch": torch.__version__, "python": platform.python_version()},
            sites=sorted(answers.replies),
            absent=answers.absent | answers.refused,
            counts={site: reply.payload.get("counts") for site, reply in sorted(answers.replies.items())},
            skipped_studies={s: reply.payload.get("skipped_studies") for s, reply in sorted(answers.replies.items())},
            exchange={
                "tensors": len(schema.shapes),
                "parameters": schema.parameters,
                "bytes": self._bytes_down,
                "full_parameters": model.get("parameters"),
                "full_bytes": 4 * int(model.get("parameters") or 0),
                "dtype_up": schema.dtype_up,
            },
            time_steps=controller.time_steps,
            rounds=controller.num_rounds,
            first_round=controller.first_round,
            alpha=controller.policy.alphas().tolist(),
        )
        logger.info(
            f"run {controller.run_id}: {len(answers.replies)} site(s), {schema.parameters} values of "
            f"{len(schema.shapes)} tensors travel, {controller.num_rounds} rounds x {controller.time_steps} steps"
        )
        self._evaluation(controller.first_round - 1, answers, "warm_start")

    def step(self, r: int, t: int, alpha: float, answers: Answers, residual_norm: float, update_norm: float) -> None:
        """One residual step: who sent what, and how far w moved."""
        replies = sorted(answers.replies.items())
        sites = {
            site: {
                "samples": int(reply.numbers["samples"]),
                "train_loss": reply.numbers.get("train_loss"),
                "last_loss": reply.numbers.get("last_loss"),
                "seconds": reply.numbers.get("seconds"),
                "bytes_up": answers.bytes_up[site],
            }
            for site, reply in replies
        }
        asked = len(replies) + len(answers.abstained) + len(answers.refused) + len(answers.absent)
        self.record.write(
            "step",
            round=r,
            step=t,
            alpha=alpha,
            residual_norm=residual_norm,
            update_norm=update_norm,
            skipped=not replies,
            sites=sites,
            abstained=answers.abstained,
            absent=answers.absent,
            refused=answers.refused,
            seconds=max(answers.seconds.values(), default=0.0),
            bytes_down=self._bytes_down * asked,
            bytes_up=sum(answers.bytes_up.values()),
        )
        self._scalar(f"alpha/step {t}", alpha, r)
        self._scalar(f"norm of the residual/step {t}", residual_norm, r)
        for site, values in sites.items():
            self._scalar(f"training loss at step {t}/{site}", values["train_loss"], r)
        loss = " ".join(f"{s} {v['train_loss']:.3f}" for s, v in sites.items() if v["train_loss"] is not None)
        logger.info(
            f"round {r}, step {t}: " + (f"alpha {alpha:.3f}, loss {loss}" if sites else "skipped, nobody had data")
        )

    def outer(
        self,
        r: int,
        closing: Answers,
        alphas: torch.Tensor,
        moved: torch.Tensor,
        gradient_norm: float | None,
        floored: list[int],
        seconds: float,
    ) -> None:
        """The outer step: T numbers, validation loss, and how alpha moved."""
        sites: dict[str, Any] = {}
        left_out = closing.abstained | closing.absent | closing.refused
        for site, reply in sorted(closing.replies.items()):
            if "validation_loss" not in reply.numbers:
                left_out[site] = "no validation patient"
                continue
            sites[site] = {
                "validation_loss": reply.numbers["validation_loss"],
                "n": int(reply.numbers["reports"]),
                "t_numbers": reply.payload.get("t_numbers"),
            }
            if reply.payload.get("t_numbers") is None:
                left_out[site] = "it did not receive every step of this round"
        reports = sum(entry["n"] for entry in sites.values())
        loss = sum(entry["validation_loss"] * entry["n"] for entry in sites.values()) / reports if reports else None
        if loss is not None:
            self._losses[r] = loss
        self._scalar("validation loss/all sites", loss, r)
        for site, entry in sites.items():
            self._scalar(f"validation loss/{site}", entry["validation_loss"], r)
        self._metrics.setdefault("alpha", []).append(alphas.tolist())
        self._metrics.setdefault("validation_loss", []).append(loss)
        self.record.write(
            "outer",
            round=r,
            validation_loss=loss,
            sites=sites,
            left_out=left_out,
            psi_grad_norm=gradient_norm,
            floored_steps=floored,
            alpha_before=alphas.tolist(),
            alpha_after=moved.tolist(),
            seconds=seconds,
        )
        shown = "none (no validation patient)" if loss is None else f"{loss:.4f}"
        logger.info(f"round {r}: validation loss {shown}, alpha " + " ".join(f"{a:.3f}" for a in moved.tolist()))
        self._evaluation(r, closing, "final")

    def is_best(self, r: int) -> bool:
        """Whether round r has the lowest validation loss so far; without any validation patient the last one counts."""
        return self._best() in (None, r)

    def adapter(self, w: Tensors, r: int) -> None:
        """Write ``adapter/`` in PEFT's own format, with what it belongs to."""
        run = {"run_id": self._metrics["run_id"], "round": r, "time_steps": self._metrics["time_steps"]}
        info = {"format": 1, "fedtar_flare": __version__, **run, **self._base_model}
        write_adapter(self.folder / "adapter", w, self._adapter_config, info)

    def _examples(self) -> None:
        """Of a simulation's synthetic sites, whose state lies on this machine: what was generated, for the page."""
        for path in sorted((home() / "state" / self._metrics["run_id"]).glob(f"*/{EXAMPLES_FILE}")):
            examples = read_examples(path)
            if examples.synthetic:
                write_json(self.folder / EXAMPLES_FOLDER / f"{examples.site}.json", asdict(examples))

    def _best(self) -> int | None:
        """The earliest round with the lowest validation loss."""
        return min(self._losses, key=lambda r: (self._losses[r], r)) if self._losses else None

    def progress(self) -> dict[str, Any]:
        """What a resumed run must know of the rounds before."""
        return {"losses": {str(r): loss for r, loss in self._losses.items()}, "metrics": self._metrics}

    def restore(self, info: Mapping[str, Any]) -> None:
        """Take up :meth:`progress` of the run that is resumed."""
        self._losses = {int(r): float(loss) for r, loss in info.get("losses", {}).items()}
        self._metrics = dict(info.get("metrics", {}))

    def finish(self) -> None:
        """After the ``end`` event: metrics, model card, page, and the closing table; nothing where no run began."""
        if "run_id" not in self._metrics:
            return
        from fedtar_flare.reporting.console import final_table
        from fedtar_flare.reporting.model_card import write_model_card
        from fedtar_flare.reporting.page import write_report
        from fedtar_flare.reporting.run import read_run

        self._examples()
        best = self._best()
        write_json(self.folder / METRICS_FILE, self._metrics | {"best_round": best})
        run = read_run(self.folder)
        adapter = self.folder / "adapter"
        if adapter.is_dir():
            write_model_card(run, adapter)
        page = write_report(self.folder)
        for line in final_table(run).splitlines():
            logger.info(line)
        logger.info(f"report:  {page}")
        logger.info(f"record:  {self.record.path}")
        if adapter.is_dir():
            logger.info(f"adapter: {adapter} (best round by validation loss: {best or 'last'})")

    def _evaluation(self, r: int, answers: Answers, key: str) -> None:
        scores = {s: a.payload["scores"] for s, a in sorted(answers.replies.items()) if a.payload.get("scores")}
        if scores:
            self.record.write("evaluation", round=r, sites=scores)
            for site, cells in scores.items():
                for name in (score.name for score in SCORES.values() if score.curve):
                    self._scalar(f"{name}/{site}", cells["all"].get(name), r)
            if key != "warm_start" or key not in self._metrics:
                self._metrics[key] = scores
