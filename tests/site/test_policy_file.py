"""What a site's policy file says of streamed scalars and of classes; what cannot be read allows nothing."""

import json

import pytest

from fedtar_flare.provision.kit import site_policy
from fedtar_flare.registry import own_names
from fedtar_flare.site.policy import (
    GUARD,
    PRIVACY_FILTER,
    allowed_methods,
    streaming_allowed,
)


def write(tmp_path, content):
    (tmp_path / "local").mkdir(exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / "local" / "privacy.json").write_text(text)


def policy(*filters):
    return site_policy(["fedtar"], filters=[{"path": path, "args": {}} for path in filters])


def test_scalars_stream_where_the_guard_stands_alone(tmp_path):
    assert streaming_allowed(tmp_path)  # no policy of its own, as in the simulator
    write(tmp_path, policy())
    assert streaming_allowed(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        policy(PRIVACY_FILTER),
        policy("nvflare.app_common.filters.SVTPrivacy"),
        policy("hospital.filters.Noise"),  # has not "Privacy" in its name
        {"scopes": [policy()["scopes"][0], policy("hospital.filters.Noise")["scopes"][0]]},
        {"scopes": [{"task_result_filters": [{"name": "OutboundGuard"}]}]},
        {"scopes": [{"task_result_filters": [GUARD]}]},
        {"scopes": [{"task_result_filters": {"path": GUARD}}]},
        {"scopes": [GUARD]},
        {"scopes": ""},
        {"task_result_filters": []},
        [],
        "{",
        "",
        "\udcff",
    ],
)
def test_scalars_do_not_stream_past_a_filter_that_may_be_for_privacy(tmp_path, content):
    if content == "\udcff":
        write(tmp_path, "")
        (tmp_path / "local" / "privacy.json").write_bytes(b"\xff")
    else:
        write(tmp_path, content)
    assert not streaming_allowed(tmp_path)


def test_what_is_installed_is_allowed_nowhere_by_itself(madeup):
    assert "fedtar" in own_names() and madeup.method not in own_names()
    assert allowed_methods(site_policy(own_names())) == list(own_names())


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
