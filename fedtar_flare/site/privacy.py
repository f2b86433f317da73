"""Differential privacy of one site's messages: clip, add Gaussian noise, keep account, stop when the budget is spent.

``GaussianPrivacy`` bounds the L2 norm of a **whole message** and adds noise to it at the site, before it leaves. Its
unit is therefore the site's data as a whole: for any two data sets of this site with the same numbers of visits per
step and split, and for anyone who reads all its messages (the server included), the update tensors and noisy numbers
are (epsilon, delta)-indistinguishable. A patient has at least this protection, at far more noise than one patient
needs; for one patient there is DP-SGD in the learner (:mod:`fedtar_flare.learning.patient_privacy`).

Outside the guarantee: the numbers of visits (taken as public), whether and when a site answers, the public reason of an
abstention or error, and anything that passes no result filter. Initial weights hold no data. A field that a method's
contract declares neither public nor noisy (scores, training losses, left-out studies, times) is not sent. Collected
rows, pooled modules and personal tensors are refused.

FLARE's ``SVTPrivacy`` and ``PercentilePrivacy`` are not differential privacy: they select or clip values by the data
itself and account for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from pydantic import Field as Setting

from fedtar_flare.core.draws import standard_normals
from fedtar_flare.core.errors import ExchangeError, FedTARError
from fedtar_flare.core.files import locked
from fedtar_flare.core.settings import Settings, build
from fedtar_flare.protocol.contract import Contract, Field, Task
from fedtar_flare.protocol.exchange import check_tensor, euclidean_norm, register_tensors
from fedtar_flare.protocol.messages import ABSTAIN, HEADER, OK, Reply, TaskHeader, check_field
from fedtar_flare.registry import contract_of
from fedtar_flare.site.accountant import FILE, Ledger, Spent
from fedtar_flare.site.audit import HEADER_PROP, REFUSED_PROP
from fedtar_flare.site.context import Site
from fedtar_flare.site.guard import SENDS, refusal

__all__ = ["PrivacySettings"]

register_tensors()


class PrivacySettings(Settings):
    """Settings of :class:`GaussianPrivacy`."""

    clip_norm: float = Setting(
        1.0, gt=0, description="C, L2 norm of an update; noise grows with it: what updates have, by the audit, not more"
    )
    noise_multiplier: float = Setting(
        1.0, gt=0, description="z of an update: deviation of the noise over the sensitivity"
    )
    delta: float = Setting(1e-5, gt=0, lt=1, description="well under one over the number of the site's patients")
    max_epsilon: float = Setting(10.0, gt=0, description="the budget of all runs; with it spent the site abstains")
    vector_clip: float = Setting(1.0, gt=0, description="largest L2 norm of a noisy list of numbers")
    loss_clip: float = Setting(10.0, gt=0, description="largest noisy number")
    closing_noise_multiplier: float = Setting(
        0.0, ge=0, description="z of the noisy fields; 0: they are not sent, and the server has only the other sites'"
    )


class GaussianPrivacy(Filter):
    """Result filter of a site's own ``privacy.json``, before the outbound guard; settings: :class:`PrivacySettings`.

    The method's contract says which fields are public or noisy and which tensors an update holds. All tensors of a
    difference together are clipped to the L2 norm ``clip_norm`` = C and get Gaussian noise of standard deviation
    ``noise_multiplier * 2 C``, since two clipped updates can lie 2 C apart (Dwork and Roth 2014, A.1). Of the noisy
    fields, a number is clipped to [0, ``loss_clip``] and a list of numbers to the L2 norm ``vector_clip``; scaled to
    [-1, 1] and to the unit ball, the m noisy fields that a task declares are one vector of sensitivity ``2 sqrt(m)``
    and one release, with ``closing_noise_multiplier``. Noise is added before the cast to float32.
    """

    def __init__(self, **settings: Any):
        super().__init__()
        self.settings = build(PrivacySettings, settings, "GaussianPrivacy")

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Replace private values by noisy ones, or the message by an abstention once the budget is spent."""
        if shareable.get_return_code() not in (None, ReturnCode.OK):
            return shareable
        task = str(fl_ctx.get_prop(FLContextKey.TASK_NAME))
        try:
            site = Site.of_task(fl_ctx)
            dxo = from_shareable(shareable)
            reply = Reply.from_meta(dxo.meta)
            header = fl_ctx.get_prop(HEADER_PROP)
            if reply.status != OK:
                return _message(DXO(DataKind.METRICS, data={}), replace(reply, numbers={}, payload={}))
            if not isinstance(header, TaskHeader):
                raise ExchangeError("the header of the task is not known")
            contract = contract_of(reply.method)
            return self._release(contract, contract.task(task), header, dxo, reply, site)
        except (FedTARError, ValueError) as error:
            public = error.public if isinstance(error, FedTARError) else "a message that is none of this plugin's"
            self.logger.error(f"privacy filter: nothing was sent for task '{task}': {error}")
            fl_ctx.set_prop(REFUSED_PROP, public, private=True, sticky=False)
            return refusal(shareable, f"privacy filter at the site: {public}")

    def clipped(self, update: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Scale an update down to the L2 norm ``clip_norm`` over all tensors, in float64."""
        for name in sorted(update):
            check_tensor(name, update[name])
        factor = min(1.0, self.settings.clip_norm / max(euclidean_norm(update), 1e-300))
        return {name: update[name].double() * factor for name in sorted(update)}

    def noisy_update(self, update: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Clip, add noise of standard deviation ``noise_multiplier * 2 clip_norm``, cast to float32."""
        scale = self.settings.noise_multiplier * 2 * self.settings.clip_norm
        return {
            name: (value + scale * standard_normals(value.numel()).reshape(value.shape)).float()
            for name, value in self.clipped(update).items()
        }

    def noisy_fields(self, declared: int, values: Mapping[Field, Any]) -> dict[str, Any]:
        """The noisy fields of a message by name, as one release of the ``declared`` number."""
        settings, unit = self.settings, dict[Field, np.ndarray]()
        for field, value in values.items():
            numbers = np.atleast_1d(np.asarray([] if value is None else value, np.float64))
            if field.kind == "number":
                unit[field] = 2 * np.clip(numbers, 0.0, settings.loss_clip) / settings.loss_clip - 1
            else:
                unit[field] = numbers / max(settings.vector_clip, float(np.linalg.norm(numbers)))
        whole = np.concatenate(list(unit.values()))
        noise = settings.closing_noise_multiplier * 2 * math.sqrt(declared) * standard_normals(len(whole)).numpy()
        released: dict[str, Any] = {}
        for field, vector in unit.items():
            noisy, noise = vector + noise[: len(vector)], noise[len(vector) :]
            if field.kind == "number":
                number = float((noisy[0] + 1) / 2 * settings.loss_clip)
                released[field.name] = min(max(number, field.least), field.most)
            else:
                numbers = noisy * settings.vector_clip
                released[field.name] = None if values[field] is None else numbers.tolist()
        return released

    def _release(
        self, contract: Contract, task: Task, header: TaskHeader, dxo: DXO, reply: Reply, site: Site
    ) -> Shareable:
        settings, tensors, sent = self.settings, _covered(contract, task, dxo), reply.numbers | reply.payload
        noisy = [field for field in task.fields if field.noisy]
        values = {field: sent[field.name] for field in noisy if sent.get(field.name) is not None}
        for field, value in values.items():  # what cannot be released costs no budget
            check_field(field, value)
        releasing = bool(values) and settings.closing_noise_multiplier > 0
        updating = bool(tensors) and task.sends == "difference"
        multipliers = [settings.noise_multiplier] * updating + [settings.closing_noise_multiplier] * releasing
        file = site.records / FILE
        with locked(file):
            ledger = Ledger(file, scope=header.run_id if site.simulated else None)
            if multipliers and ledger.spent(settings.delta, multipliers).epsilon > settings.max_epsilon:
                spent = ledger.spent(settings.delta)
                budget = f"epsilon {spent.epsilon:.3g} of {settings.max_epsilon:g}, delta {settings.delta:g}"
                reason = f"privacy budget spent ({budget})"
                nothing = replace(reply, status=ABSTAIN, reason=reason, numbers={}, payload=self._account(spent))
                return _message(DXO(DataKind.METRICS, data={}), nothing)
            for multiplier in multipliers:  # before anything leaves: a crash costs budget, never privacy
                ledger.add(header.run_id, multiplier)
            account = self._account(ledger.spent(settings.delta))
        if updating:
            dxo.data = self.noisy_update(tensors)
        # numbers of visits that belong to noisy fields are of no use without them
        public = [field for field in task.fields if field.public and (releasing or not noisy or field.required)]
        left = {field.name: sent[field.name] for field in public if field.name in sent}
        if releasing:
            left |= {field.name: None for field in noisy if field.name in sent} | self.noisy_fields(len(noisy), values)
        left |= account
        numbers = {name: value for name, value in left.items() if name in reply.numbers}
        payload = {name: value for name, value in left.items() if name not in reply.numbers}
        return _message(dxo, replace(reply, numbers=numbers, payload=payload))

    def _account(self, spent: Spent) -> dict[str, Any]:
        return {"privacy": asdict(spent) | {"max_epsilon": self.settings.max_epsilon}}


def _covered(contract: Contract, task: Task, dxo: DXO) -> Mapping[str, torch.Tensor]:
    """Get the tensors of a message; raises ExchangeError if it holds anything that no noise covers."""
    if dxo.data_kind == DataKind.METRICS:
        if dxo.data:
            raise ExchangeError("metrics outside the header are not covered by the privacy filter")
        return {}
    if SENDS.get(dxo.data_kind) != task.sends or not isinstance(dxo.data, Mapping):
        raise ExchangeError(f"data of kind '{dxo.data_kind}' is not covered in task '{task.name}'")
    for name in dxo.data:
        check_tensor(str(name), dxo.data[name])
        group = contract.group_of(task, str(name))
        if group is not None and (group.personal or group.form != "averaged"):
            raise ExchangeError(f"tensors of the group '{group.name}' do not leave a site with a privacy filter")
    return dxo.data


def _message(dxo: DXO, reply: Reply) -> Shareable:
    return DXO(dxo.data_kind, data=dxo.data, meta={HEADER: reply.to_meta()[HEADER]}).to_shareable()
