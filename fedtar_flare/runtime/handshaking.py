"""Who takes part: the handshake, what the sites agree on, the common initial weights, and sites that come later."""

import hashlib
import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedtar_flare.core.errors import ExchangeError, FedTARError, plain
from fedtar_flare.core.tensor_file import coarse_checksums, coarsely_equal
from fedtar_flare.protocol.exchange import MASTER_DTYPE, ExchangeSchema, Tensors
from fedtar_flare.protocol.messages import Reply, TaskHeader, compatible, version
from fedtar_flare.protocol.tasks import CLOSE_ROUND, HANDSHAKE
from fedtar_flare.record.events import Alarm
from fedtar_flare.runtime.aggregation import PLAUSIBLE, plausible
from fedtar_flare.runtime.alarms import raise_alarm
from fedtar_flare.runtime.lora_mean import check_form
from fedtar_flare.runtime.results import Results
from fedtar_flare.runtime.tasking import Answers, OnReply, TaskController, now
from fedtar_flare.version import __version__

Row = Mapping[str, Any]
"""What of a site must be as at the others (model, adapter, settings), by name."""


class HandshakeController(TaskController):
    """The handshake of every method. What it finds: the ``sites`` that take part, their agreed ``schema``, their
    visits (``visits``) and how each describes its model (``described``). Arguments as :class:`FederatedController`.
    """

    results: Results
    sites: list[str]
    schema: ExchangeSchema
    first_round: int
    _agreed: Row
    _members: set[str]
    """Sites that took part before a resume."""
    _steps_before: int
    """T of the run that is resumed."""

    def __init__(self) -> None:
        super().__init__()
        self._wire = self.contract.allowing(["*"])  # which parameters travel whole is for the sites to say
        self.visits: dict[str, Any] = {}
        self._announced: dict[str, Any] = {}
        self._alarms: list[str] = []
        self.described: dict[str, Any] = {}
        self.lora_mean = "factors"
        self.lora_ranks: dict[str, int] = {}
        """Of the sites' adapters, where it is below the job's; else 0."""

    @abstractmethod
    def header(self, r: int, t: int, after: str, evaluate: bool = False) -> TaskHeader:
        """The header of a task of round r, step t, for sites whose state is that of version ``after``."""

    def ahead(self, r: int) -> range:
        """The periods whose scores after round r are ahead of time: nothing was learnt from them until then."""
        if n := self.config.rounds_per_period:
            return range(-(-r // n) + 1, -(-r // n) + 1 + bool(r))
        return range(self._steps_before + 1, self.config.time_steps + 1) if r == self.first_round - 1 else range(0)

    @property
    def members(self) -> list[str]:
        """The sites that take part and are not named in ``unseen``."""
        return [site for site in self.sites if site not in self.config.unseen]

    def ask(
        self,
        task: str,
        header: TaskHeader,
        weights: Tensors | None,
        sites: Sequence[str],
        on_reply: OnReply,
        time_limit: int | None = None,
        min_sites: int | None = None,
    ) -> Answers:
        """As :class:`TaskController`; unseen sites are asked after the members, for scores of all of their patients."""
        unseen = [site for site in sites if site in self.config.unseen]
        members = [site for site in sites if site not in unseen]
        answers = super().ask(task, header, weights, members, on_reply, time_limit, min_sites)
        if unseen and (task != CLOSE_ROUND or header.evaluate):
            everyone = replace(header, score="all")
            answers.add(super().ask(task, everyone, weights, unseen, on_reply, time_limit, min_sites=0))
        return answers

    def gather(self, w: Tensors | None) -> tuple[Tensors, Answers]:
        """Greet all that are connected; the weights to start from (``w``, else one site's initial ones), the answers.

        FedTARError where fewer than ``min_sites`` take part or agree, or nobody gives initial weights.
        """
        live = self.live_sites()
        source = self.config.initial_site or (live[0] if live else "")
        if w is None and source not in live:
            raise FedTARError(f"initial_site '{source}' is not connected; connected: {', '.join(live) or 'none'}")
        initial: dict[str, Tensors] = {}
        answers = self._greet(live, w, "" if w is not None else source, initial, least=self.config.min_sites)
        if not answers.replies:  # all abstained
            raise FedTARError("no site takes part: " + "; ".join(f"{s}: {why}" for s, why in answers.abstained.items()))
        self._agreed = agree(answers, self.config.min_sites)
        self.sites = sorted(answers.replies)
        self.schema = ExchangeSchema.from_dict(answers.replies[self.sites[0]].payload["schema"])
        self.lora_mean = answers.replies[self.sites[0]].payload.get("lora_mean", "factors")
        check_form(self.lora_mean, self.config.aggregation)
        w = w if w is not None else self._common_start(source, initial, answers)
        self.schema.check(w)
        self._remember(answers)
        return w, answers

    def _common_start(self, source: str, initial: dict[str, Tensors], answers: Answers) -> Tensors:
        """The first site's initial weights, ``source`` before the others, that more than half of the sites have too."""
        said = {site: reply.payload["start"] for site, reply in answers.replies.items() if "start" in reply.payload}
        doubted: set[str] = set()
        for site in sorted(self.sites, key=lambda name: name != source):
            if site not in initial:
                self._greet([site], None, site, initial, evaluate=False)
            if site in initial:
                own = coarse_checksums(initial[site])
                others = {name for name, one in said.items() if not coarsely_equal(one, own)}
                if not said or 2 * len(others) < len(said):
                    if doubted | others:
                        names = ", ".join(sorted(doubted | others))
                        self.raise_alarm(f"{names}: another start than the one that the seed gives at the other sites")
                    return initial[site]
            doubted.add(site)
        raise FedTARError(
            "no site sent initial weights that more than half of the sites get from the seed too. Their checksums: "
            + "; ".join(f"{site} {one}" for site, one in sorted(said.items()))
        )

    def _remember(self, answers: Answers) -> None:
        for site, reply in answers.replies.items():
            self._announced[site] = {split: list(steps) for split, steps in reply.payload["counts"].items()}
            self.described[site] = reply.payload.get("model") or {}
            self.lora_ranks[site] = int(reply.numbers.get("rank", 0))
        self.visits = plausible(self._announced)
        for site, reply in answers.replies.items():
            reply.payload["counts"] = self.visits[site]
            if self.visits[site] != self._announced[site]:
                self.raise_alarm(
                    f"{site} says that it has far more visits than the other sites: of each split it is believed at "
                    f"most {PLAUSIBLE} times their median"
                )

    def raise_alarm(self, text: str) -> None:
        """Say once in the log, on the run's page and among the server's alarms what people must look at."""
        if text in self._alarms:
            return
        self._alarms.append(text)
        self.record.write(Alarm(time=now(), text=text))
        raise_alarm(Path(self.get_run_dir()).parent, text)

    def _greet(
        self,
        sites: list[str],
        w: Tensors | None,
        source: str,
        initial: dict[str, Tensors],
        *,
        evaluate: bool = True,
        least: int = 0,
        before: int | None = None,
    ) -> Answers:
        """The handshake with some sites; members of a resumed run get a task of their own, as they must have its state.

        ``source`` is the one site asked for its initial weights, which go into ``initial``. With w None each site
        scores its own initial weights. ``before`` is the round that begins next; by default the first of this job.
        """

        def accept(site: str, reply: Reply, tensors: Tensors) -> None:
            schema = ExchangeSchema.from_dict(reply.payload.get("schema"))
            if "rank" in reply.numbers and self.config.aggregation != "mean":
                raise ExchangeError(
                    f"its lora_rank is its own, for which aggregation '{self.config.aggregation}' has no form"
                )
            if tensors and site != source:
                raise ExchangeError("it sent weights that nobody had asked it for")
            if site == source:
                agreed = dict(schema.shapes)
                self._wire.check_tensors(HANDSHAKE, tensors, agreed, sends="initial", dtypes=MASTER_DTYPE)
                initial[site] = {name: tensors[name].clone() for name in sorted(tensors)}

        first = before or self.first_round
        header = self.header(0, 0, version(first - 1, self.config.time_steps if first > 1 else 0), evaluate)
        header = replace(header, initial_site=source)
        answers = Answers()
        for member in (False, True):
            asked = [site for site in sites if (site in self._members) is member]
            if not asked and (member or self._members):
                continue
            needed = least if len(asked) == len(sites) else 0
            limit = (
                self.config.handshake_time_limit if before is None else self.config.step_time_limit
            )  # the others wait meanwhile
            answers.add(self.ask(HANDSHAKE, replace(header, member=member), w, asked, accept, limit, needed))
        if answers.count < least:
            raise FedTARError(f"handshake: {answers.count} site(s) took part, min_sites is {least}")
        return answers

    def admit_late_sites(self, w: Tensors, r: int) -> None:
        """Let sites that missed the handshake, or connected since, join at the start of a round."""
        waiting = [s for s in self.live_sites() if s not in {*self.sites, *self._silent, *self.results.turned_away}]
        if r == self.first_round or not waiting:
            return
        new = self.ahead(r - 1) or self.ahead(self.first_round - 1)  # scored as with a site that took part already
        answers = self._greet(waiting, w, "", {}, evaluate=len(new) > 0, before=r)
        agree(answers, 0, self._agreed)
        self._remember(answers)
        self.sites = sorted({*self.sites, *answers.replies})
        self.results.joined(r, answers)
        self.results.evaluation(r - 1, answers, new)


def agree(answers: Answers, min_sites: int, like: Row | None = None) -> Row:
    """Keep the sites that agree; the others move from ``replies`` to ``refused`` and the run goes on without them.

    Without ``like`` the largest group of sites that agree among themselves and run the server's version stays; of equal
    groups, the one with the first site by name. With ``like``, what a run has agreed on, each site must match it.
    Returns what those that stay share; with fewer than ``min_sites`` raises FedTARError, with who differs in what.
    """
    rows = {site: _row(reply) for site, reply in sorted(answers.replies.items())}
    if like is None:
        usable = [site for site in rows if rows[site]["fedtar_flare"] == __version__] or list(rows)
        groups = [[other for other in usable if rows[other] == rows[site]] for site in usable]
        kept = max(groups, key=len, default=[])
        row: Row = rows[kept[0]] if kept else {}
        if len({rows[group[0]]["description"] for group in groups if len(group) == len(kept)}) > 1:
            raise FedTARError(
                "as many sites describe the model in one way as in another; give all sites the same job and base "
                f"model. Who differs in what:\n{disagreement_table(rows)}"
            )
    else:
        row = like
        kept = [site for site in rows if rows[site] == row]
    if len(kept) < min_sites:
        table = disagreement_table({**rows, "(server)": {**next(iter(rows.values()), {}), "fedtar_flare": __version__}})
        raise FedTARError(
            "too few sites agree on what is exchanged; install the same fedtar_flare everywhere and give all sites "
            f"the same model and adapter settings. Who differs in what:\n{table}"
        )
    for site in sorted(set(rows) - set(kept)):
        differing = sorted(key for key in {*row, *rows[site]} if row.get(key) != rows[site].get(key))
        answers.refused[site] = f"it differs from the other sites in: {', '.join(differing[:5])}"
        del answers.replies[site]
    return row


def _row(reply: Reply) -> dict[str, Any]:
    schema = ExchangeSchema.from_dict(reply.payload["schema"])
    about = [reply.payload.get(name) or {} for name in ("model", "adapter_config")]
    release = (reply.payload.get("versions") or {}).get("fedtar_flare")
    return {
        "fedtar_flare": __version__ if compatible(release) else str(release),
        "settings": reply.payload.get("settings"),
        "base weights": (reply.payload.get("model") or {}).get("fingerprint"),
        "description": hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16],
        "updates in": schema.dtype_up,
        "tensors": len(schema.shapes),
        "parameters": schema.parameters,
        **{f"tensor {name}": list(shape) for name, shape in schema.shapes},
    }


def disagreement_table(values: Mapping[str, Row]) -> str:
    """Who differs in what (site to field to value), as a plain-text table of the fields that differ."""
    sites = sorted(values)
    rows = [["", *sites]]  # of what sites have sent: no value of it makes lines of the log
    for name in sorted({name for row in values.values() for name in row}):
        found = [plain(values[site].get(name, "(missing)")) for site in sites]
        if len(set(found)) > 1:
            rows.append([name, *found])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
