"""FedMRG at the server: one exchange a round, a weighted mean, and scores at hospitals that train and that do not."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import ValidationError

from fedtar_flare.core.errors import ExchangeError
from fedtar_flare.methods.fedavg import FedAvgServer
from fedtar_flare.methods.fedmrg.bank import FEATURES, FeatureBank
from fedtar_flare.methods.fedmrg.events import Bank, LossParts, Outside
from fedtar_flare.protocol.exchange import Tensors
from fedtar_flare.protocol.messages import Reply
from fedtar_flare.runtime.controller import FederatedController
from fedtar_flare.runtime.exchange import Answers


class FedMRGServer(FedAvgServer):
    """FedMRG at the server (Che et al., Algorithm 1); the specialised adapter stays, as its text and figure say."""

    def __init__(self, run: FederatedController):
        super().__init__(run)
        self.bank = FeatureBank()
        self._round = 0
        self._rows: torch.Tensor | None = None

    def one_round(self, w: Tensors, r: int) -> Tensors:
        """One exchange of updates, their mean by numbers of visits, and scores (Algorithm 1)."""
        self._round, self._rows = r, self.bank.rows(r)
        aggregate, answers = self.run.train(w, r, 1)
        if aggregate is not None:
            w = self.merge(w, aggregate, answers)
        self.run.record.write(LossParts(round=r, sites=_of_replies(answers, "loss_parts")))
        if use := _of_replies(answers, "bank"):
            down = 0 if self._rows is None else len(self._rows)
            self.run.record.write(Bank(round=r, rows=down, sites=use))
        self.run.close_round(w, r)
        return w

    # ------------------------------------------------------------------ the bank
    def extra_tensors(self, w: Tensors) -> Tensors:
        """The rows of the bank, unless it is empty."""
        return {} if self._rows is None else {FEATURES: self._rows}

    def collect(self, site: str, rows: Tensors) -> None:
        """Take a site's rows, if they have the width that most sites' encoders have."""
        if not len(rows[FEATURES]):
            return
        widths = Counter(self.run.membership.described[member].get("feature_width") for member in self.trainers())
        width, _ = widths.most_common(1)[0]
        if rows[FEATURES].shape[1] != width:
            raise ExchangeError(f"'{FEATURES}' has rows of width {rows[FEATURES].shape[1]}; most sites have {width}")
        self.bank.put(site, self._round, rows[FEATURES])

    def state(self) -> dict[str, torch.Tensor]:
        return self.bank.state()

    def load_state(self, state: Tensors) -> None:
        self.bank.load(state)

    # ------------------------------------------------------------------ record and checks
    def on_start(self) -> None:
        if outside := [site for site in self.run.membership.sites if site not in self.run.membership.members]:
            self.run.record.write(Outside(sites=outside))

    def check_content(self, reply: Reply) -> None:
        """Parts of losses and of the bank's use are numbers by name."""
        super().check_content(reply)
        for name, kind in (("loss_parts", LossParts), ("bank", Bank)):
            try:
                kind(round=0, sites={"site": reply.payload.get(name) or {}})
            except ValidationError as error:
                raise ExchangeError(f"the field '{name}' does not hold numbers by name") from error


def _of_replies(answers: Answers, field: str) -> dict[str, Mapping[str, Any]]:
    return {site: reply.payload[field] for site, reply in sorted(answers.replies.items()) if reply.payload.get(field)}
