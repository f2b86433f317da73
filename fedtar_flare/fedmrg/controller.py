"""FedMRG at the server: one exchange a round, a weighted mean, and scores at hospitals that train and that do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from pydantic import ValidationError

from fedtar_flare.errors import ConfigError, ExchangeError, FedTARError
from fedtar_flare.fedmrg.bank import FEATURES, FeatureBank
from fedtar_flare.fedmrg.contract import CONTRACT
from fedtar_flare.fedmrg.events import Bank, Diagnoses, LossParts, Outside
from fedtar_flare.flare.controller import MethodController
from fedtar_flare.flare.tasking import Answers, OnReply, Tensors
from fedtar_flare.protocol.messages import Reply, TaskHeader
from fedtar_flare.protocol.tasks import CLOSE_ROUND


class FedMRGController(MethodController):
    """Communication-efficient heterogeneous federated report generation (FedMRG, Che et al., Algorithm 1).

    In each round every member trains on all of its visits and sends the change of the generic adapter, of the encoder
    and of the diagnosis branch; their mean by visits is added. What the paper's Algorithm 1 uploads beside it, the
    specialised adapter, stays at the site, as its text and figure say.

    Args:
        unseen: names of sites that never train; they get the handshake, and all of their patients are scored.
        args, kwargs: of :class:`MethodController`; FLARE's export finds its parameters by these two names.
    """

    contract = CONTRACT

    def __init__(self, *args: Any, unseen: Sequence[str] | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.bank = FeatureBank(self.seed)
        self._round = 0
        self._rows: torch.Tensor | None = None
        if isinstance(unseen, str) or not all(isinstance(name, str) for name in unseen or ()):
            raise ConfigError(f"unseen must be a list of sites' names, not {unseen!r}")
        self.unseen = list(unseen) if unseen else None
        if self.initial_site and self._is_unseen(self.initial_site):
            raise ConfigError(f"initial_site '{self.initial_site}' is one of the unseen sites")

    def one_round(self, w: Tensors, r: int) -> Tensors:
        """One exchange of updates, their mean by numbers of visits, and scores (Algorithm 1)."""
        self._round, self._rows = r, self.bank.rows(r)
        ages = self.bank.ages(r)
        mean, answers = self.train(w, r, 1)
        if mean is not None:
            w = {name: (w[name].double() + mean[name]).float() for name in sorted(w)}
        self.record.write(LossParts(round=r, sites=_of_replies(answers, "loss_parts")))
        if use := _of_replies(answers, "bank"):
            down = 0 if self._rows is None else len(self._rows)
            self.record.write(Bank(round=r, rows=down, oldest=max(ages, default=None), sites=use))
        closing = self.close_round(w, r)
        if diagnoses := _of_replies(closing, "diagnoses"):
            self.record.write(Diagnoses(round=r, sites=diagnoses))
        return w

    # ------------------------------------------------------------------ the bank
    def beside(self, w: Tensors) -> Tensors:
        """The bank, unless it is empty."""
        return {} if self._rows is None else {FEATURES: self._rows}

    def collect(self, site: str, rows: Tensors) -> None:
        """A site's rows, of the width that most sites' encoders have."""
        if FEATURES not in rows or not len(rows[FEATURES]):
            return
        widths = Counter(self.described[member].get("feature_width") for member in self.trainers())
        width, _ = widths.most_common(1)[0]
        if rows[FEATURES].shape[1] != width:
            raise ExchangeError(
                f"tensor '{FEATURES}' has rows of {rows[FEATURES].shape[1]}; those of all are of {width}"
            )
        self.bank.put(site, self._round, rows[FEATURES])

    def method_state(self) -> dict[str, torch.Tensor]:
        """The bank."""
        return self.bank.state()

    def load_method_state(self, state: Tensors) -> None:
        self.bank.load(state)

    # ------------------------------------------------------------------ members and unseen sites
    def trainers(self) -> list[str]:
        """The members."""
        return [site for site in self.sites if not self._is_unseen(site)]

    def trained_visits(self, r: int, t: int) -> Callable[[list[int]], int]:
        """All of a site's training visits."""
        return sum

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
        """Unseen sites are asked after the members, for the scores of all of their patients."""
        members = [site for site in sites if not self._is_unseen(site)]
        unseen = [site for site in sites if self._is_unseen(site)]
        answers = super().ask(task, header, weights, members, on_reply, time_limit, min_sites)
        if unseen and (task != CLOSE_ROUND or header.evaluate):
            everyone = replace(header, score="all")
            answers.add(super().ask(task, everyone, weights, unseen, on_reply, time_limit, min_sites=0))
        return answers

    def _is_unseen(self, site: str) -> bool:
        return site in (self.unseen or ())

    def on_start(self) -> None:
        if not self.trainers():
            raise FedTARError("every site that takes part is named in server.unseen: there is nobody to train")
        if self.unseen:
            self.record.write(Outside(sites=[site for site in self.sites if self._is_unseen(site)]))

    # ------------------------------------------------------------------ checks
    def check_content(self, reply: Reply) -> None:
        """Parts of losses and predicted prompts are numbers by name."""
        super().check_content(reply)
        for name, kind in (("loss_parts", LossParts), ("diagnoses", Diagnoses), ("bank", Bank)):
            try:
                kind(round=0, sites={"site": reply.payload.get(name) or {}})
            except ValidationError as error:
                raise ExchangeError(f"the field '{name}' does not hold numbers by name") from error

    def method_settings(self) -> dict[str, Any]:
        return {"unseen": self.unseen or []}


def _of_replies(answers: Answers, field: str) -> dict[str, Mapping[str, Any]]:
    return {site: reply.payload[field] for site, reply in sorted(answers.replies.items()) if reply.payload.get(field)}
