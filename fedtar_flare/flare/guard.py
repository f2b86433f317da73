"""The outbound guard: a FLARE result filter that lets nothing leave a site but the agreed exchange.

It stands behind the executor, as a filter of the job or, better, of the site's own ``privacy.json`` where no job can
switch it off. What it does not know does not pass: the message is replaced by an error reply that names what was
refused and carries nothing else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from nvflare.apis.dxo import DataKind, MetaKey, from_shareable
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedtar_flare.errors import ConfigError, ExchangeError
from fedtar_flare.flare.exchange import WIRE_DTYPES, check_tensor
from fedtar_flare.flare.tasks import ERROR, HANDSHAKE, HEADER, TASKS, TRAIN, Reply
from fedtar_flare.flare.tensors import register_tensors

register_tensors()

LORA_NAMES = r"(^|\.)lora_[AB]\.weight$"
"""The default: only the shared LoRA factors, under PEFT's own names."""

MAX_TEXT = 512
"""Longest text that may leave in one field, in characters (a reason, a version, a tensor's name)."""

TEXT_FIELDS = {"status", "reason"}
PAYLOAD_FIELDS = {
    "schema",  # tensor names and shapes, number format
    "versions",  # of packages
    "settings",  # digest of the settings that must agree
    "counts",  # visits per split and step
    "min_cell",  # fewest reports of a cell that has scores
    "adapter_config",  # PEFT's own, public
    "model",  # parameter counts, base model's name
    "scores",  # per step: n and scores
    "t_numbers",  # the T numbers of the hypergradient
    "skipped_studies",  # reason to count
}


class OutboundGuard(Filter):
    """Refuses whatever is not the agreed exchange.

    Args:
        allowed_names: regular expressions; a tensor leaves only when its name matches one of them. Default: the shared
            LoRA factors. The hypernetwork, the projection and the mixture have other names and can never match.
        max_values: largest number of values of one message (default 50 million).

    A message passes when its task is one of this plugin's, its tensors have allowed names, are finite, float32 or
    bfloat16, and (in ``train``) have exactly the names and shapes of what the server sent down in the same task, and
    when its header holds numbers, short texts and the known fields only.
    """

    def __init__(self, allowed_names: Sequence[str] = (LORA_NAMES,), max_values: int = 50_000_000):
        super().__init__()
        if not allowed_names or isinstance(allowed_names, str):
            raise ConfigError("OutboundGuard: allowed_names must be a non-empty list of regular expressions")
        try:
            self._patterns = [re.compile(pattern) for pattern in allowed_names]
        except re.error as error:
            raise ConfigError(f"OutboundGuard: allowed_names has a bad regular expression: {error}") from error
        if max_values < 1:
            raise ConfigError(f"OutboundGuard: max_values must be positive, not {max_values}")
        self.allowed_names = list(allowed_names)
        self.max_values = max_values

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the message unchanged, or an error reply in its place."""
        if shareable.get_return_code() not in (None, ReturnCode.OK):
            return shareable  # FLARE's own error replies carry a code and no data
        task = str(fl_ctx.get_prop(FLContextKey.TASK_NAME))
        try:
            self.check(shareable, task, fl_ctx.get_prop(FLContextKey.TASK_DATA))
        except ExchangeError as error:
            self.logger.error(f"outbound guard: nothing was sent for task '{task}': {error}")
            return refusal(shareable, f"outbound guard at the site: {error}")
        return shareable

    def check(self, shareable: Shareable, task: str, task_data: Shareable | None) -> None:
        """Raise :class:`ExchangeError` on the first thing that may not leave."""
        if task not in TASKS:
            raise ExchangeError(f"task '{task}' is not one of this plugin's ({', '.join(TASKS)})")
        dxo = from_shareable(shareable)
        unknown = set(dxo.meta) - {HEADER, MetaKey.INITIAL_METRICS, MetaKey.NUM_STEPS_CURRENT_ROUND}
        if unknown:
            raise ExchangeError(f"the message carries the unknown field '{sorted(map(str, unknown))[0]}'")
        reply = Reply.from_meta(dxo.meta)
        self._check_header(reply)
        if dxo.data_kind == DataKind.METRICS:
            _check_numbers("metrics", dxo.data)
            return
        if dxo.data_kind not in (DataKind.WEIGHTS, DataKind.WEIGHT_DIFF) or task not in (HANDSHAKE, TRAIN):
            raise ExchangeError(f"data of kind '{dxo.data_kind}' may not leave in task '{task}'")
        if task == TRAIN and dxo.data_kind != DataKind.WEIGHT_DIFF:
            raise ExchangeError("only a difference may leave in task 'train', not full weights")
        self._check_tensors(dxo.data, _sent_down(task_data) if task == TRAIN else None)

    def _check_tensors(self, tensors: Any, sent_down: Mapping[str, Any] | None) -> None:
        if not isinstance(tensors, Mapping):
            raise ExchangeError("the tensors of the message are not a dictionary")
        for name in sorted(map(str, tensors)):
            if not any(pattern.search(name) for pattern in self._patterns):
                raise ExchangeError(f"tensor '{name}' is not allowed to leave")
            if sent_down is not None and name not in sent_down:
                raise ExchangeError(f"tensor '{name}' was not sent down in this task")
            check_tensor(name, tensors[name], tuple(sent_down[name].shape) if sent_down else None, WIRE_DTYPES)
        if sent_down is not None and (missing := sorted(set(sent_down) - set(tensors))):
            raise ExchangeError(f"tensor '{missing[0]}' was sent down but does not come back")
        if (values := sum(value.numel() for value in tensors.values())) > self.max_values:
            raise ExchangeError(f"{values} values in one message; the limit is {self.max_values}")

    @staticmethod
    def _check_header(reply: Reply) -> None:
        if len(reply.reason) > MAX_TEXT:
            raise ExchangeError(f"the field 'reason' is longer than {MAX_TEXT} characters")
        _check_numbers("numbers", reply.numbers)
        for key, value in reply.payload.items():
            if key not in PAYLOAD_FIELDS:
                raise ExchangeError(f"the reply carries the unknown field '{key}'")
            _check_primitives(key, value)


def refusal(shareable: Shareable, reason: str) -> Shareable:
    """An error reply with the refused message's round and step and nothing else of it."""
    header = from_shareable(shareable).meta.get(HEADER)
    header = header if isinstance(header, dict) else {}
    place = {key: value if isinstance(value := header.get(key), int) else -1 for key in ("round", "step")}
    reply = Reply(ERROR, place["round"], place["step"], reason[:MAX_TEXT])
    return FLModelUtils.to_shareable(FLModel(metrics={}, meta=reply.to_meta()))


def _sent_down(task_data: Shareable | None) -> Mapping[str, Any]:
    if task_data is None:
        raise ExchangeError("the task that this message answers is not known")
    data = from_shareable(task_data).data
    if not isinstance(data, Mapping):
        raise ExchangeError("the task that this message answers carried no tensors")
    return data


def _check_numbers(where: str, values: Any) -> None:
    if not isinstance(values, Mapping):
        raise ExchangeError(f"the field '{where}' is not a dictionary")
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ExchangeError(f"the value '{key}' of '{where}' is not a finite number")


def _check_primitives(where: str, value: Any, depth: int = 0) -> None:
    """Numbers, None, truth values and short texts, in dictionaries and lists of bounded depth."""
    if depth > 6:
        raise ExchangeError(f"the field '{where}' is nested too deeply")
    if value is None or isinstance(value, bool | int):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ExchangeError(f"a value of '{where}' is not finite")
    elif isinstance(value, str):
        if len(value) > MAX_TEXT:
            raise ExchangeError(f"a text of '{where}' is longer than {MAX_TEXT} characters")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _check_primitives(where, str(key), depth + 1)
            _check_primitives(where, item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_primitives(where, item, depth + 1)
    else:
        raise ExchangeError(f"the field '{where}' carries a {type(value).__name__}")
