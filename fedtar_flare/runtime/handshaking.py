"""Who takes part: the handshake, what the sites agree on, the common initial weights, and sites that come later."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any

from fedtar_flare.errors import ConfigError, ExchangeError, FedTARError
from fedtar_flare.protocol.exchange import MASTER_DTYPE, TENSOR_NAME, ExchangeSchema
from fedtar_flare.protocol.messages import Reply, TaskHeader, version
from fedtar_flare.protocol.tasks import HANDSHAKE
from fedtar_flare.runtime.agreement import Row, agree
from fedtar_flare.runtime.results import Results
from fedtar_flare.runtime.tasking import Answers, TaskController, Tensors


class HandshakeController(TaskController):
    """The handshake of every method. What it finds: the ``sites`` that take part, their agreed ``schema``, their
    visits (``visits``) and how each describes its model (``described``).

    Args:
        min_sites, step_time_limit: of :class:`TaskController`.
        handshake_time_limit, initial_site: of :class:`FederatedController`.
    """

    results: Results
    sites: list[str]
    schema: ExchangeSchema
    first_round: int
    time_steps: int
    _agreed: Row
    _members: set[str]
    """Sites that took part before a resume."""

    def __init__(self, min_sites: int, step_time_limit: int, handshake_time_limit: int, initial_site: str):
        super().__init__(min_sites=min_sites, step_time_limit=step_time_limit)
        if handshake_time_limit < 0:
            raise ConfigError(f"handshake_time_limit must be 0 (none) or seconds, not {handshake_time_limit}")
        self.handshake_time_limit, self.initial_site = handshake_time_limit, initial_site
        self._wire = self.contract.allowing([TENSOR_NAME])  # which parameters travel whole is for the sites to say
        self.visits: dict[str, Any] = {}
        self.described: dict[str, Any] = {}

    @abstractmethod
    def header(self, r: int, t: int, after: str, evaluate: bool = False) -> TaskHeader:
        """The header of a task of round r, step t, for sites whose state is that of version ``after``."""

    def gather(self, w: Tensors | None) -> tuple[Tensors, Answers]:
        """Greet all that are connected; the weights to start from (``w``, else one site's initial ones), the answers.

        Raises:
            FedTARError: fewer than ``min_sites`` take part, or nobody gives initial weights.
            ExchangeError: the sites do not agree.
        """
        live = self.live_sites()
        source = self.initial_site or (live[0] if live else "")
        if w is None and source not in live:
            raise FedTARError(f"initial_site '{source}' is not connected; connected: {', '.join(live) or 'none'}")
        initial: dict[str, Tensors] = {}
        answers = self._greet(live, w, "" if w is not None else source, initial, least=self.min_sites)
        if not answers.replies:  # all were heard, and all abstained
            raise FedTARError("no site takes part: " + "; ".join(f"{s}: {why}" for s, why in answers.abstained.items()))
        self._agreed = agree(answers, self.min_sites)
        self.sites = sorted(answers.replies)
        self.schema = ExchangeSchema.from_dict(answers.replies[self.sites[0]].payload["schema"])
        if w is None and source not in self.sites:  # the site that was to give the start failed: take the next one's
            source = self.sites[0]
            self._greet([source], None, source, initial, evaluate=False)
            if source not in initial:
                raise FedTARError(f"site {source} did not send its initial weights; see the record and its own log")
        w = w if w is not None else initial[source]
        self.schema.check(w)
        self._remember(answers)
        return w, answers

    def _remember(self, answers: Answers) -> None:
        for site, reply in answers.replies.items():
            self.visits[site] = reply.payload["counts"]
            self.described[site] = reply.payload.get("model") or {}

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
            if tensors and site != source:
                raise ExchangeError("it sent weights that nobody had asked it for")
            if site == source:
                agreed = dict(schema.shapes)
                self._wire.check_tensors(HANDSHAKE, tensors, agreed, sends="initial", dtypes=MASTER_DTYPE)
                initial[site] = {name: tensors[name].clone() for name in sorted(tensors)}

        first = before or self.first_round
        header = self.header(0, 0, version(first - 1, self.time_steps if first > 1 else 0), evaluate)
        header = replace(header, initial_site=source)
        answers = Answers()
        for member in (False, True):
            asked = [site for site in sites if (site in self._members) is member]
            if not asked and (member or self._members):
                continue
            needed = least if len(asked) == len(sites) else 0
            limit = self.handshake_time_limit if before is None else self.step_time_limit  # the others wait meanwhile
            more = self.ask(HANDSHAKE, replace(header, member=member), w, asked, accept, limit, needed)
            answers.add(more)
        if answers.heard < least:
            raise FedTARError(f"handshake: {answers.heard} site(s) took part, min_sites is {least}")
        return answers

    def admit_late_sites(self, w: Tensors, r: int) -> None:
        """Let sites that missed the handshake, or connected since, join at the start of a round."""
        waiting = [s for s in self.live_sites() if s not in {*self.sites, *self._silent, *self.results.turned_away}]
        if r == self.first_round or not waiting:
            return
        answers = self._greet(waiting, w, "", {}, evaluate=False, before=r)
        agree(answers, 0, self._agreed)
        self._remember(answers)
        self.sites = sorted({*self.sites, *answers.replies})
        self.results.joined(r, answers)
