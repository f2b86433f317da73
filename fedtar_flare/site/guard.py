"""The outbound guard: a FLARE result filter that lets nothing leave a site but the agreed exchange.

It stands behind the executor, as a filter of the job or, better, of the site's own ``privacy.json`` where no job can
switch it off. What it does not know does not pass: the message is replaced by an error reply that names what was
refused and carries nothing else.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nvflare.apis.dxo import DataKind, MetaKey, from_shareable
from nvflare.apis.filter import Filter, FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable, make_reply
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from fedtar_flare.errors import ConfigError, ExchangeError
from fedtar_flare.protocol.exchange import WIRE_DTYPES, ExchangeSchema, check_tensor
from fedtar_flare.protocol.messages import ERROR, HEADER, Reply
from fedtar_flare.protocol.tasks import HANDSHAKE, TRAIN
from fedtar_flare.protocol.tensors import register_tensors
from fedtar_flare.site.audit import REFUSED_PROP

register_tensors()
TASKS = ("handshake", "train", "close_round")

LORA_NAMES = r"(^|\.)lora_[AB]\.weight$"
"""The default: only the shared LoRA factors, under PEFT's own names."""

SENT_DOWN = "fedtar_sent_down"
"""Where the guard of the task data leaves names and shapes for the guard of the result, in the task's own context."""

MAX_TEXT = 512
"""Longest text that may leave in one field, in characters (a reason, a version, a tensor's name)."""

MAX_HEADER = 300_000
"""Largest header, in characters of JSON: the schema of the paper's model needs a fifth of it."""

_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}|\d{1,4}")
_HEADERS = {
    ReservedHeaderKey.CONTENT_TYPE,
    ReservedHeaderKey.RC,
    AppConstants.START_ROUND,
    AppConstants.CURRENT_ROUND,
    AppConstants.NUM_ROUNDS,
}
_CODES = {value for name, value in vars(ReturnCode).items() if not name.startswith("_")}


class OutboundGuard(Filter):
    """Refuses whatever is not the agreed exchange.

    Args:
        allowed_names: regular expressions; a tensor leaves only when its name matches one of them. Default: the shared
            LoRA factors. The hypernetwork, the projection and the mixture have other names and can never match.
        max_values: largest number of values of one message (default 50 million).

    A message passes when its task is one of this plugin's, its tensors have allowed names, are finite, float32 or
    bfloat16, and (in ``train``) have exactly the names and shapes of what the server sent down in the same task, and
    when its header holds the known fields only, each in its own form: counts and scores are numbers under short words,
    T numbers a list of numbers, and so on. Anything beside the message itself (other keys, other FLARE headers) is
    refused, and an error reply of FLARE passes as its bare code.
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
        """Return the message unchanged, or an error reply in its place.

        As a filter of task data it only remembers the names and shapes of what came down, because FLARE forgets the
        task before it filters the result.
        """
        if self.get_prop(FilterContextKey.CHAIN_TYPE) == FilterChainType.TASK_DATA_CHAIN:
            fl_ctx.set_prop(SENT_DOWN, _shapes(shareable), private=True, sticky=False)
            return shareable
        code = shareable.get_return_code()
        if code not in (None, ReturnCode.OK):  # nothing travels with an error but its code
            return make_reply(code if code in _CODES else ReturnCode.EXECUTION_EXCEPTION)
        task = str(fl_ctx.get_prop(FLContextKey.TASK_NAME))
        try:
            self.check(shareable, task, _sent_down(fl_ctx))
        except ExchangeError as error:
            self.logger.error(f"outbound guard: nothing was sent for task '{task}': {error}")
            fl_ctx.set_prop(REFUSED_PROP, str(error), private=True, sticky=False)
            return refusal(shareable, f"outbound guard at the site: {error}")
        return shareable

    def check(self, shareable: Shareable, task: str, sent_down: Mapping[str, tuple[int, ...]] | None) -> None:
        """Raise :class:`ExchangeError` on the first thing that may not leave."""
        if task not in TASKS:
            raise ExchangeError(f"task '{task}' is not one of this plugin's ({', '.join(TASKS)})")
        headers = shareable.get(ReservedHeaderKey.HEADERS) or {}
        beside = (set(shareable) - {ReservedHeaderKey.HEADERS, "DXO"}) | (set(headers) - _HEADERS)
        if beside:
            raise ExchangeError(f"the message carries '{sorted(map(str, beside))[0]:.80}' beside its content")
        try:
            dxo = from_shareable(shareable)
        except ValueError as error:
            raise ExchangeError(f"the message has no content that this plugin sends ({error})") from error
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
        if task == TRAIN and not sent_down:
            raise ExchangeError("what the server sent down is not known (is the guard a filter of task data too?)")
        self._check_tensors(dxo.data, sent_down if task == TRAIN else None)

    def _check_tensors(self, tensors: Any, sent_down: Mapping[str, tuple[int, ...]] | None) -> None:
        if not isinstance(tensors, Mapping):
            raise ExchangeError("the tensors of the message are not a dictionary")
        for name in sorted(map(str, tensors)):
            if not any(pattern.search(name) for pattern in self._patterns):
                raise ExchangeError(f"tensor '{name}' is not allowed to leave")
            if sent_down is not None and name not in sent_down:
                raise ExchangeError(f"tensor '{name}' was not sent down in this task")
            check_tensor(name, tensors[name], sent_down[name] if sent_down else None, WIRE_DTYPES)
        if sent_down is not None and (missing := sorted(set(sent_down) - set(tensors))):
            raise ExchangeError(f"tensor '{missing[0]}' was sent down but does not come back")
        if (values := sum(value.numel() for value in tensors.values())) > self.max_values:
            raise ExchangeError(f"{values} values in one message; the limit is {self.max_values}")

    @staticmethod
    def _check_header(reply: Reply) -> None:
        if len(reply.reason) > MAX_TEXT:
            raise ExchangeError(f"the field 'reason' is longer than {MAX_TEXT} characters")
        if not isinstance(reply.plugin, str) or len(reply.plugin) > 40:
            raise ExchangeError("the field 'plugin' is not a version")
        _check_numbers("numbers", reply.numbers)
        for key, value in reply.payload.items():
            if key not in PAYLOAD_FIELDS:
                raise ExchangeError(f"the reply carries the unknown field '{key!s:.80}'")
            _check_primitives(key, value)
            PAYLOAD_FIELDS[key](key, value)
        if (length := len(json.dumps([reply.numbers, reply.payload]))) > MAX_HEADER:
            raise ExchangeError(f"the header has {length} characters; the limit is {MAX_HEADER}")


def refusal(shareable: Shareable, reason: str) -> Shareable:
    """An error reply with the refused message's round and step and nothing else of it."""
    try:
        header = (from_shareable(shareable).meta or {}).get(HEADER)
    except ValueError:
        header = None
    header = header if isinstance(header, dict) else {}
    place = {key: value if isinstance(value := header.get(key), int) else -1 for key in ("round", "step")}
    reply = Reply(ERROR, place["round"], place["step"], reason[:MAX_TEXT])
    return FLModelUtils.to_shareable(FLModel(metrics={}, meta=reply.to_meta()))


def _sent_down(fl_ctx: FLContext) -> Mapping[str, tuple[int, ...]] | None:
    """Names and shapes of the task that is answered; None when they are not known."""
    shapes = fl_ctx.get_prop(SENT_DOWN)
    if shapes is None and (task := fl_ctx.get_prop(FLContextKey.TASK_DATA)) is not None:
        shapes = _shapes(task)
    return shapes


def _shapes(task: Shareable) -> dict[str, tuple[int, ...]]:
    data = from_shareable(task).data
    tensors = data.items() if isinstance(data, Mapping) else ()
    return {str(name): tuple(value.shape) for name, value in tensors if hasattr(value, "shape")}


def _check_numbers(where: str, values: Any) -> None:
    if not isinstance(values, Mapping):
        raise ExchangeError(f"the field '{where}' is not a dictionary")
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ExchangeError(f"the value '{key!s:.80}' of '{where}' is not a finite number")
        if not isinstance(key, str) or not _WORD.fullmatch(key):
            raise ExchangeError(f"the name of a value of '{where}' is not a short word")


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


def _check_schema(where: str, value: Any) -> None:
    ExchangeSchema.from_dict(value)


def _check_number(where: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ExchangeError(f"the field '{where}' is not a number")


def _check_list(where: str, value: Any) -> None:
    """None or a list of at most a hundred numbers."""
    if value is None:
        return
    if not isinstance(value, list | tuple) or len(value) > 100:
        raise ExchangeError(f"the field '{where}' is not a short list of numbers")
    for item in value:
        _check_number(where, item)


def _check_tree(where: str, value: Any) -> None:
    """Numbers, None and short lists of numbers under short words, at any depth: no free text."""
    if not isinstance(value, Mapping):
        raise ExchangeError(f"the field '{where}' is not a dictionary")
    for key, item in value.items():
        if not isinstance(key, str) or not _WORD.fullmatch(key):
            raise ExchangeError(f"a name within '{where}' is not a short word")
        if isinstance(item, Mapping):
            _check_tree(where, item)
        elif isinstance(item, list | tuple):
            _check_list(where, item)
        elif item is not None:
            _check_number(where, item)


def _check_word(where: str, value: Any) -> None:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9_.+-]{1,64}", value):
        raise ExchangeError(f"the field '{where}' is not a short word")


def _check_words(where: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ExchangeError(f"the field '{where}' is not a dictionary")
    for key, item in value.items():
        _check_word(where, key)
        _check_word(where, item)


def _check_settings(where: str, value: Any) -> None:
    """Settings that the job itself made: primitives (checked before)."""
    if not isinstance(value, Mapping):
        raise ExchangeError(f"the field '{where}' is not a dictionary")


PAYLOAD_FIELDS: dict[str, Callable[[str, Any], None]] = {
    "schema": _check_schema,  # tensor names and shapes, number format
    "versions": _check_words,  # of packages
    "settings": _check_word,  # digest of the settings that must agree
    "counts": _check_tree,  # visits per split and step
    "min_cell": _check_number,  # fewest reports of a cell that has scores
    "adapter_config": _check_settings,  # PEFT's own, public
    "model": _check_settings,  # parameter counts, base model's name and settings
    "scores": _check_tree,  # per step: n and scores
    "t_numbers": _check_list,  # the T numbers of the hypergradient
    "skipped_studies": _check_tree,  # reason to count
    "privacy": _check_tree,  # epsilon, delta and budget of a site with differential privacy
}
"""Fields of a reply's payload that may leave, each with the check of its form."""
