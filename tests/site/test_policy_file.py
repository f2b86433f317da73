"""What a site's policy file says of streamed scalars and of classes; what cannot be read allows nothing."""

import json
from types import SimpleNamespace

import pytest
from flare_context import context, read
from nvflare.apis.filter import FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.signal import Signal

from fedtar_flare.core import plugins
from fedtar_flare.core.errors import ConfigError
from fedtar_flare.protocol.messages import TaskHeader, version
from fedtar_flare.provision.kit import site_policy
from fedtar_flare.registry import default_names, own_names
from fedtar_flare.runtime.site_executor import SiteExecutor
from fedtar_flare.site.context import streaming_allowed
from fedtar_flare.site.guard import OutboundGuard
from fedtar_flare.site.policy import GUARD, PRIVACY_FILTER, allowed_methods


def write(tmp_path, content):
    (tmp_path / "local").mkdir(exist_ok=True)
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    (tmp_path / "local" / "privacy.json").write_bytes(raw)


def policy(*filters):
    return site_policy(["fedtar"], filters=[{"path": path, "args": {}} for path in filters])


NOISE = "hospital.filters.Noise"  # has not "Privacy" in its name
UNCLEAR = [{"scopes": [{"task_result_filters": filters}]} for filters in ([{"name": "OutboundGuard"}], [GUARD])]
UNCLEAR += [{"scopes": [{"task_result_filters": {"path": GUARD}}]}, {"scopes": [GUARD]}, {"scopes": ""}]
UNCLEAR += [{"task_result_filters": []}, [], b"{", b"", b"\xff"]
FILTERED = [policy(path) for path in (PRIVACY_FILTER, "nvflare.app_common.filters.SVTPrivacy", NOISE)]
FILTERED += [{"scopes": [policy()["scopes"][0], policy(NOISE)["scopes"][0]]}]


@pytest.mark.parametrize("content", [*FILTERED, *UNCLEAR])
def test_scalars_do_not_stream_past_a_filter_that_may_be_for_privacy(tmp_path, content):
    assert streaming_allowed(tmp_path)  # no policy of its own, as in the simulator
    write(tmp_path, policy())
    assert streaming_allowed(tmp_path)  # the guard stands alone
    write(tmp_path, content)
    assert not streaming_allowed(tmp_path)


def _guards(results, tasks):
    kinds = (("task_result_filters", results), ("task_data_filters", tasks))
    return {kind: [{"path": GUARD, "args": arguments} for arguments in guards] for kind, guards in kinds}


@pytest.mark.parametrize(
    ("scopes", "allowed"),
    [
        ([_guards([{"methods": ["a", "b"]}], [{"methods": ["b", "c"]}])], ["b"]),  # both ways must let it pass
        ([_guards([{"methods": ["a"]}, {"methods": ["b"]}], [{"methods": ["a"]}])], []),
        ([_guards([{"methods": ["a"]}], [])], []),
        ([_guards([{}], [{"methods": ["a"]}])], []),
        ([_guards([{"methods": []}], [{"methods": []}])], []),
        ([_guards([{"methods": [name]}], [{"methods": [name]}]) for name in "ab"], ["a", "b"]),  # a job names its scope
        ([], []),
        (["no scope"], []),
    ],
)
def test_the_allowed_methods_are_those_that_both_guards_list(scopes, allowed):
    assert allowed_methods({"scopes": scopes}) == allowed


def test_a_method_that_the_site_does_not_allow_is_not_even_imported(tmp_path, monkeypatch, madeup):
    """FLARE builds a job's executor before any filter of the site runs."""
    assert "fedtar" in own_names() and madeup.method not in own_names()
    assert allowed_methods(site_policy(own_names())) == list(own_names())
    assert set(own_names()) - set(default_names()) == {"scaffold"}, "what has a caution is allowed where it is named"
    loaded = []
    point = SimpleNamespace(name="unlisted", value="evil:METHOD", dist=None, load=lambda: loaded.append(1))
    monkeypatch.setitem(plugins.announced("method"), "unlisted", point)
    executor, header = SiteExecutor("unlisted"), TaskHeader("unlisted", "run", 0, 0, 1, 1, version(0, 0))
    ctx = context(tmp_path, "handshake", header=header)
    task = ctx.get_prop(FLContextKey.TASK_DATA)
    guard = OutboundGuard(["fedtar"])
    guard.set_prop(FilterContextKey.CHAIN_TYPE, FilterChainType.TASK_DATA_CHAIN)
    guard.process(task, ctx)
    reply, _ = read(executor.execute("handshake", task, ctx, Signal()))
    assert reply.status == "error" and "unlisted" in reply.reason and not loaded
    with pytest.raises(ConfigError, match="unlisted"):
        _ = executor.strategy
    assert loaded
