"""``Membership``: the handshake, what the sites agree on, the common initial weights, and sites that come later."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from nvflare.apis.job_def import ALL_SITES, SERVER_SITE_NAME
from nvflare.private.fed.utils.fed_utils import extract_participants

from fedtar_flare.core.errors import ConfigError, ExchangeError, FedTARError
from fedtar_flare.core.files import coarse_checksums, coarsely_equal, read_json
from fedtar_flare.core.text import columns, plain
from fedtar_flare.protocol.contract import HANDSHAKE
from fedtar_flare.protocol.exchange import ExchangeSchema, Tensors, check_tensors
from fedtar_flare.protocol.messages import Reply, compatible, version
from fedtar_flare.runtime.aggregation import PLAUSIBLE, plausible_counts
from fedtar_flare.runtime.exchange import Answers
from fedtar_flare.runtime.training import check_form
from fedtar_flare.site.policy import RESOURCES, entries_of, local_file
from fedtar_flare.version import __version__

Row = Mapping[str, Any]
"""What a site must share with the others (model, adapter, settings), by name."""


class Membership:
    """The sites of a run, and what they agreed on; ``run`` is the controller, through which messages go."""

    schema: ExchangeSchema
    """Names and shapes of the tensors that travel."""
    _agreed: Row

    def __init__(self, run: Any):
        self.run = run
        self.sites: list[str] = []
        """Sites that take part, sorted."""
        self.members: list[str] = []
        """Those of them that train: not named in ``server.unseen``."""
        self.visits: dict[str, Any] = {}
        """A site's numbers of visits per time step, by site and split."""
        self.described: dict[str, Any] = {}
        """A site's description of its model, by site."""
        self.lora_mean = "factors"
        """Form of the mean of the sites' adapters: ``factors``, ``product`` or ``ffa``."""
        self.lora_ranks: dict[str, int] = {}
        """Rank of a site's adapter where it is below the job's, else 0, by site."""
        self.turned_away: set[str] = set()
        """Sites that were refused in a handshake; they are not asked again."""
        self.resumed: set[str] = set()
        """Sites that took part before a resume, which must have their state."""
        self.steps_before: int = run.config.time_steps
        """T of the run that is resumed."""
        self._announced: dict[str, Any] = {}

    def gather(self, weights: Tensors | None) -> tuple[Tensors, Answers]:
        """Open the run with all connected sites: the weights to start from (by default a site's), and the answers."""
        config, live = self.run.config, self.run.exchange.live_sites()
        self._name_absent(live)
        if not live:
            raise FedTARError("no site is connected")
        initial: dict[str, Tensors] = {}
        answers = self._greet(live, weights, "" if weights is not None else live[0], initial, least=config.min_sites)
        if not answers.replies:  # all abstained
            raise FedTARError("no site takes part: " + "; ".join(f"{s}: {why}" for s, why in answers.abstained.items()))
        self._agreed = agree(answers, config.min_sites)
        first = answers.replies[min(answers.replies)].payload
        self.schema = ExchangeSchema.from_dict(first["schema"])
        self.lora_mean = first.get("lora_mean", "factors")
        check_form(self.lora_mean, config.aggregation)
        weights = weights if weights is not None else self._common_start(live[0], initial, answers)
        self.schema.check(weights)
        self._add(answers)
        return weights, answers

    def _name_absent(self, live: list[str]) -> None:
        """Raise the alarm on hospitals that the job is for and that are not in it: FLARE deploys to none afterwards."""
        run_dir = Path(self.run.get_run_dir())
        if not (run_dir / "meta.json").is_file():  # a simulation
            return
        if absent := sorted((_expected_sites(run_dir) | self.resumed) - set(live)):
            job = self.run.fl_ctx.get_job_id()
            text = f"job {job} began without {', '.join(absent)}: not connected at its start, so not in it to its end"
            self.run.results.alarm(f"{text} (once they are: abort it and resume it)")
            self.run.exchange.left_out |= dict.fromkeys(absent, "not connected when the job began")

    def admit_late_sites(self, weights: Tensors, r: int) -> None:
        """Let sites that missed the handshake, or connected since, join at the start of round r."""
        run = self.run
        known = {*self.sites, *run.exchange.silent, *self.turned_away}
        waiting = [site for site in run.exchange.live_sites() if site not in known]
        if r == run.first_round or not waiting:
            return
        new = self.unlearnt_periods(r - 1) or self.unlearnt_periods(run.first_round - 1)  # as for a site that was here
        answers = self._greet(waiting, weights, "", {}, evaluate=len(new) > 0, before=r)
        agree(answers, 0, self._agreed)
        self._add(answers)
        run.results.joined(r, answers)
        run.results.evaluation(r - 1, answers, new)

    def unlearnt_periods(self, r: int) -> range:
        """List the periods that are scored after round r (0: the handshake) before anything is learnt from them."""
        if n := self.run.config.rounds_per_period:
            return range(-(-r // n) + 1, -(-r // n) + 1 + bool(r))
        if r == self.run.first_round - 1:
            return range(self.steps_before + 1, self.run.config.time_steps + 1)
        return range(0)

    def _greet(
        self,
        sites: list[str],
        weights: Tensors | None,
        source: str,
        initial: dict[str, Tensors],
        *,
        evaluate: bool = True,
        least: int = 0,
        before: int | None = None,
    ) -> Answers:
        """The handshake with some sites; members of a resumed run get a task of their own, as they must have its state.

        ``source`` is the one site asked for its weights, into ``initial``; ``before``: the round that begins next.
        """
        run, config, contract = self.run, self.run.config, self.run.wire_contract

        def accept(site: str, reply: Reply, tensors: Tensors) -> None:
            schema = ExchangeSchema.from_dict(reply.payload.get("schema"))
            if "rank" in reply.numbers and config.aggregation != "mean":
                raise ExchangeError(f"its lora_rank is its own: aggregation '{config.aggregation}' has no form for it")
            if tensors and site != source:
                raise ExchangeError("it sent weights that nobody had asked it for")
            if site == source:
                check_tensors(contract, HANDSHAKE, tensors, schema.shapes, sends="initial")
                initial[site] = {name: tensors[name].clone() for name in sorted(tensors)}

        first = before or run.first_round
        evaluate = evaluate and not run.origin  # these weights were scored in the run before
        header = run.header(0, 0, version(first - 1, config.time_steps if first > 1 else 0), evaluate)
        header = replace(header, initial_site=source)
        limit = config.handshake_time_limit if before is None else config.step_time_limit  # for which the others wait
        answers = Answers()
        for member in (False, True):
            group = [site for site in sites if (site in self.resumed) is member]
            if not group and (member or self.resumed):
                continue
            needed = least if len(group) == len(sites) else 0
            header = replace(header, member=member, origin=run.origin if member else "")
            answers.add(run.send_task(HANDSHAKE, header, weights, group, accept, limit, needed))
        if answers.count < least:
            raise FedTARError(f"handshake: {answers.count} site(s) took part, min_sites is {least}")
        return answers

    def _common_start(self, source: str, initial: dict[str, Tensors], answers: Answers) -> Tensors:
        """Initial weights that most sites get from the seed, ``source``'s first: no site alone chooses."""
        sent = {site: reply.payload["start"] for site, reply in answers.replies.items() if "start" in reply.payload}
        doubted: set[str] = set()
        for site in sorted(answers.replies, key=lambda name: (name != source, name)):
            if site not in initial:
                self._greet([site], None, site, initial, evaluate=False)
            if site in initial:
                checksums = coarse_checksums(initial[site])
                others = {name for name, other in sent.items() if not coarsely_equal(other, checksums)}
                if not sent or 2 * len(others) < len(sent):
                    if doubted | others:
                        names = ", ".join(sorted(doubted | others))
                        self.run.results.alarm(f"{names}: another start than the seed gives at the other sites")
                    return initial[site]
            doubted.add(site)
        checksums_of_all = "; ".join(f"{site} {checksums}" for site, checksums in sorted(sent.items()))
        raise FedTARError(f"no site sent the initial weights that most sites get from the seed: {checksums_of_all}")

    def _add(self, answers: Answers) -> None:
        """Take in the sites that agreed, with their numbers of visits as far as these are plausible."""
        for site, reply in answers.replies.items():
            self._announced[site] = {split: list(steps) for split, steps in reply.payload["counts"].items()}
            self.described[site] = reply.payload.get("model") or {}
            self.lora_ranks[site] = int(reply.numbers.get("rank", 0))
        self.turned_away |= set(answers.refused)
        self.sites = sorted({*self.sites, *answers.replies})
        left_out = self.run.exchange.left_out | answers.missing
        self.run.exchange.left_out = {site: why for site, why in left_out.items() if site not in self.sites}
        self.members = [site for site in self.sites if site not in self.run.config.unseen]
        self.visits = plausible_counts(self._announced)
        for site, reply in answers.replies.items():
            reply.payload["counts"] = self.visits[site]
            if self.visits[site] != self._announced[site]:
                text = f"{site} announces far more visits than the other sites: of each split at most {PLAUSIBLE} times"
                self.run.results.alarm(f"{text} their median count")


def _expected_sites(run_dir: Path) -> set[str]:
    """Sites that a job names; where it is for all, those of the project, as the server's kit has them, if it has."""
    names: set[str] = set()
    with suppress(ConfigError):  # missing or damaged
        for places in (read_json(run_dir / "meta.json").get("deploy_map") or {}).values():
            names |= {place for place in extract_participants(places) if place != SERVER_SITE_NAME}
    if names and ALL_SITES not in names:
        return names
    with suppress(ConfigError):
        for component in entries_of(local_file(run_dir.parent, RESOURCES), "components"):
            if sites := (component.get("args") or {}).get("sites"):
                return set(sites)
    return set()


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
        agreed = max(groups, key=len, default=[])
        row: Row = rows[agreed[0]] if agreed else {}
        if len({rows[group[0]]["description"] for group in groups if len(group) == len(agreed)}) > 1:
            text = "as many sites describe the model in one way as in another: give all the same job and base model"
            raise FedTARError(f"{text}. Who differs in what:\n{disagreement_table(rows)}")
    else:
        row = like
        agreed = [site for site in rows if rows[site] == row]
    if len(agreed) < min_sites:
        table = disagreement_table({**rows, "(server)": {**next(iter(rows.values()), {}), "fedtar_flare": __version__}})
        text = "too few sites agree on what is exchanged; give all the same fedtar_flare, model and adapter settings"
        raise FedTARError(f"{text}. Who differs in what:\n{table}")
    for site in sorted(set(rows) - set(agreed)):
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
        "tensors": len(schema.shapes),
        "parameters": schema.parameters,
        **{f"tensor {name}": list(shape) for name, shape in schema.shapes.items()},
    }


def disagreement_table(values: Mapping[str, Row]) -> str:
    """Who differs in what (site to field to value), as a plain-text table of the fields that differ."""
    sites = sorted(values)
    rows = [["", *sites]]
    for name in sorted({name for row in values.values() for name in row}):
        cells = [plain(values[site].get(name, "(missing)")) for site in sites]  # a site must not write lines of the log
        if len(set(cells)) > 1:
            rows.append([name, *cells])
    return "\n".join(columns(rows))
