"""The outbound guard: a FLARE result filter that lets nothing leave a site but what the method's contract declares.

It runs after the executor, as a filter of the job or, better, of the site's own ``privacy.json``, where no job can
switch it off. It replaces a message with anything undeclared by an error reply that only names what was refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.filter import Filter, FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable, make_reply
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedtar_flare.core.errors import ConfigError, ExchangeError
from fedtar_flare.core.settings import problem_of
from fedtar_flare.protocol.contract import Contract, Sends
from fedtar_flare.protocol.exchange import ExchangeSchema, check_names, check_tensors, register_tensors, shapes_as_sent
from fedtar_flare.protocol.messages import (
    ERROR,
    HEADER,
    MAX_ROUNDS,
    MAX_TEXT,
    WORD,
    Reply,
    TaskHeader,
    check_error,
    check_reply,
)
from fedtar_flare.registry import caution_of, contract_of
from fedtar_flare.site.audit import REFUSED_PROP

register_tensors()

INBOUND_PROP = "fedtar_flare.inbound"
"""Context property: the :class:`InboundTask`, from the guard of the task data for the guard of the result."""
NOT_ALLOWED_PROP = "fedtar_flare.not_allowed"
"""Context property: why this site does not do the task."""

SENDS: dict[str, Sends] = {DataKind.WEIGHTS: "initial", DataKind.WEIGHT_DIFF: "difference"}
"""FLARE's kinds of data that may hold tensors."""

_HEADERS = {
    ReservedHeaderKey.CONTENT_TYPE,
    ReservedHeaderKey.RC,
    AppConstants.START_ROUND,
    AppConstants.CURRENT_ROUND,
    AppConstants.NUM_ROUNDS,
}
_CODES = {value for name, value in vars(ReturnCode).items() if not name.startswith("_")}
_CONTENT = {"kind", "data", "meta"}
_REPLY = {field.name for field in fields(Reply)}


@dataclass(frozen=True)
class InboundTask:
    """A task as it came down: its header (None if it cannot be read) and the shapes of its tensors by name."""

    header: TaskHeader | None
    shapes: Mapping[str, tuple[int, ...]]


class OutboundGuard(Filter):
    """Refuses whatever the contract of an allowed method does not declare.

    A message passes when its method and task are those that came down, its header holds only declared fields, each in
    its own form, and its tensors belong to the task's groups, with the names and shapes that the server sent down or,
    where this site was asked for the initial weights, those of the schema in the same header. Anything else in the
    message (other keys, other FLARE headers) is refused. An error reply of FLARE passes as its bare code.

    ``methods`` names the methods that this site takes part in: any other is refused, even if it is installed and the
    guard of a job names it; without a list none is allowed. ``extra_names`` (:mod:`fedtar_flare.core.settings`) picks
    the base-model parameters that may travel whole; ``max_values`` is the largest number of values in one message.
    """

    def __init__(
        self, methods: Sequence[str] = (), extra_names: Sequence[str] = (), max_values: int = 50_000_000
    ) -> None:
        super().__init__()
        for name, value in (("methods", methods), ("extra_names", extra_names)):
            if isinstance(value, str | Mapping) or not all(isinstance(item, str) for item in value):
                raise ConfigError(f"OutboundGuard: {name} must be a list of texts, not {value!r}")
        if problem := problem_of(extra_names):
            raise ConfigError(f"OutboundGuard: extra_names is {list(extra_names)!r:.300}: it must be {problem}")
        if max_values < 1:
            raise ConfigError(f"OutboundGuard: max_values must be positive, not {max_values}")
        self.methods, self.extra_names, self.max_values = list(methods), list(extra_names), max_values

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Filter a message: give it back unchanged, or an error reply in its place.

        As a filter of task data the guard remembers the task, because FLARE forgets it before it filters the result,
        and marks a task of a method that is not allowed, so that the executor refuses it.

        """
        if self.get_prop(FilterContextKey.CHAIN_TYPE) == FilterChainType.TASK_DATA_CHAIN:
            inbound = _read_task(shareable)
            fl_ctx.set_prop(INBOUND_PROP, inbound, private=True, sticky=False)
            if inbound.header is not None:  # one that cannot be read is refused by the executor
                try:
                    self._contract(inbound.header.method).task(str(fl_ctx.get_prop(FLContextKey.TASK_NAME)))
                except ExchangeError as error:
                    reason = f"outbound guard at the site: {error}"
                    fl_ctx.set_prop(NOT_ALLOWED_PROP, reason, private=True, sticky=False)
            return shareable
        code = shareable.get_return_code()
        if code not in (None, ReturnCode.OK):  # nothing travels with an error but its code
            return make_reply(code if code in _CODES else ReturnCode.EXECUTION_EXCEPTION)
        task, inbound = str(fl_ctx.get_prop(FLContextKey.TASK_NAME)), fl_ctx.get_prop(INBOUND_PROP)
        if inbound is None and (sent := fl_ctx.get_prop(FLContextKey.TASK_DATA)) is not None:
            inbound = _read_task(sent)
        try:
            self._check(shareable, task, inbound, str(fl_ctx.get_identity_name()))
        except ExchangeError as error:
            self.logger.error(f"outbound guard: nothing was sent for task '{task:.80}': {error}")
            fl_ctx.set_prop(REFUSED_PROP, str(error), private=True, sticky=False)
            return refusal(shareable, f"outbound guard at the site: {error}")
        return shareable

    def _check(self, shareable: Shareable, task: str, inbound: InboundTask | None, site: str) -> None:
        """Raise :class:`ExchangeError` on the first thing that may not leave; ``inbound`` is None if unknown."""
        dxo, reply = _read(shareable)
        if reply.status == ERROR:
            check_error(reply)
            if dxo.data:
                raise ExchangeError("an error reply carries more than its reason")
            return
        contract = self._contract(reply.method)
        if inbound is None or inbound.header is None:
            raise ExchangeError("what the server sent down is not known (is the guard a filter of task data too?)")
        if reply.method != inbound.header.method:
            raise ExchangeError(f"the reply is of method '{reply.method}', the task of '{inbound.header.method}'")
        check_reply(contract, task, reply)
        schema: dict[str, tuple[int, ...]] = {}  # shapes of the tensors that may leave in this task
        for field in contract.task(task).fields:
            if field.kind == "schema" and field.name in reply.payload:
                schema |= ExchangeSchema.from_dict(reply.payload[field.name]).shapes
        check_names(contract, contract.task(task), schema)
        if dxo.data_kind == DataKind.METRICS:
            if dxo.data:
                raise ExchangeError("the message carries metrics besides its header")
            return
        sends = SENDS[dxo.data_kind]
        if sends == "initial" and inbound.header.initial_site != site:
            raise ExchangeError("initial weights were not asked of this site")
        agreed = schema if sends == "initial" else shapes_as_sent(inbound.shapes, dxo.data)
        check_tensors(contract, task, dxo.data, agreed, sends=sends)
        values = sum(value.numel() for value in dxo.data.values())
        if values > self.max_values:
            raise ExchangeError(f"{values} values in one message; the limit is {self.max_values}")

    def _contract(self, method: str) -> Contract:
        if method not in self.methods:
            allowed = ", ".join(self.methods) or "none"
            raise ExchangeError(
                f"method '{method}' is not among the methods that this site's policy allows ({allowed:.200}); the site "
                "lists them as 'methods' of both guards in local/privacy.json"
                + (f". Caution: {caution}" if (caution := caution_of(method)) else "")
            )
        try:
            return contract_of(method).allowing(self.extra_names)
        except ConfigError as error:
            raise ExchangeError(f"this site's policy allows a method that is not installed here: {error}") from error


def refusal(shareable: Shareable, reason: str) -> Shareable:
    """Make an error reply with the method, round and step of the refused message, and nothing else."""
    try:
        header = (from_shareable(shareable).meta or {}).get(HEADER)
    except (ValueError, AttributeError):
        header = None
    position: dict[str, Any] = {"round": -1, "step": -1}
    method = ""
    if isinstance(header, Mapping):
        position |= {key: header[key] for key in position if isinstance(header.get(key), int)}
        method = name if isinstance(name := header.get("method"), str) and WORD.fullmatch(name) else ""
    try:
        reply = Reply(ERROR, **position, reason=reason[:MAX_TEXT], method=method)
    except ExchangeError:  # round or step is out of bounds
        reply = Reply(ERROR, -1, -1, reason[:MAX_TEXT], method=method)
    return FLModelUtils.to_shareable(FLModel(metrics={}, meta=reply.to_meta()))


def _read(shareable: Shareable) -> tuple[DXO, Reply]:
    """Content and header of a message; raises ExchangeError if it holds anything else."""
    headers = shareable.get(ReservedHeaderKey.HEADERS) or {}
    _refuse((set(shareable) - {ReservedHeaderKey.HEADERS, "DXO"}) | (set(headers) - _HEADERS))
    for key in (AppConstants.START_ROUND, AppConstants.CURRENT_ROUND, AppConstants.NUM_ROUNDS):
        if type(headers.get(key, 0)) is not int or abs(headers.get(key, 0)) > MAX_ROUNDS:
            raise ExchangeError(f"the FLARE header '{key}' is not a number of rounds")
    try:
        dxo = from_shareable(shareable)
    except ValueError as error:
        raise ExchangeError("the message has no content that this plugin sends") from error
    if not isinstance(dxo.data_kind, str) or dxo.data_kind not in (DataKind.METRICS, *SENDS):
        raise ExchangeError("data of another kind than weights, a difference or metrics may not leave")
    meta = dxo.meta if isinstance(dxo.meta, Mapping) else {}
    header = meta.get(HEADER)
    _refuse((set(shareable["DXO"]) - _CONTENT) | (set(meta) - {HEADER}))
    _refuse(set(header) - _REPLY if isinstance(header, Mapping) else set())
    return dxo, Reply.from_meta(dict(meta))


def _refuse(names: set[Any]) -> None:
    if names:
        raise ExchangeError(f"the message carries '{sorted(map(str, names))[0]:.80}' besides its content")


def _read_task(task: Shareable) -> InboundTask:
    try:
        dxo = from_shareable(task)
    except ValueError:
        return InboundTask(None, {})
    data = dxo.data if isinstance(dxo.data, Mapping) else {}
    shapes = {str(name): tuple(value.shape) for name, value in data.items() if hasattr(value, "shape")}
    try:
        return InboundTask(TaskHeader.from_meta(dxo.meta), shapes)
    except ExchangeError:
        return InboundTask(None, shapes)
