"""The provisioned site policy as FLARE itself builds and applies it, around a task of which FLARE forgets the data."""

import json

import pytest
import torch
from nvflare.apis.fl_constant import FilterKey, FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.utils.task_utils import apply_filters
from nvflare.apis.workspace import Workspace
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.private.fed.app.fl_conf import create_privacy_manager
from nvflare.private.privacy_manager import Scope

from fedtar_flare.protocol.messages import ERROR, OK, Reply, TaskHeader, version
from fedtar_flare.provision.kit import site_policy

A, B = "base_model.model.x.lora_A.weight", "base_model.model.x.lora_B.weight"
DOWN = {A: torch.ones(2, 3), B: torch.ones(3, 2)}


@pytest.fixture
def scope(tmp_path):
    for folder in ("local", "startup"):
        (tmp_path / folder).mkdir()
    (tmp_path / "local" / "privacy.json").write_text(json.dumps(site_policy(["fedtar"])))
    return create_privacy_manager(Workspace(str(tmp_path), "hospital-a"), names_only=False).default_scope


def answer(scope, update, method="fedtar"):
    """What leaves the site when its executor answers ``train`` with this update; the job has no filter at all."""
    context = FLContext()
    context.set_prop(FLContextKey.SCOPE_OBJECT, scope, private=True, sticky=False)
    context.set_prop(FLContextKey.TASK_NAME, "train", private=True, sticky=False)
    header = TaskHeader(method, "run", 1, 1, 2, 2, version(1, 0))
    task = FLModelUtils.to_shareable(FLModel(params=DOWN, params_type=ParamsType.FULL, meta=header.to_meta()))
    apply_filters(Scope.TASK_DATA_FILTERS_NAME, task, context, {}, "train", FilterKey.IN)
    context.set_prop(FLContextKey.TASK_DATA, None, private=True, sticky=False)  # as FLARE does after the executor
    meta = Reply(OK, 1, 1, numbers={"samples": 3}, method="fedtar").to_meta()
    result = FLModelUtils.to_shareable(FLModel(params=update, params_type=ParamsType.DIFF, meta=meta))
    left = apply_filters(Scope.TASK_RESULT_FILTERS_NAME, result, context, {}, "train", FilterKey.OUT)
    model = FLModelUtils.from_shareable(left)
    return Reply.from_meta(model.meta), model.params


def test_the_agreed_update_leaves_and_anything_else_stays(scope):
    reply, params = answer(scope, DOWN)
    assert reply.status == OK and sorted(params) == sorted(DOWN)
    more = {**DOWN, "hypernetworks.x.weight": torch.ones(2)}
    for update, method, said in ((more, "fedtar", "guard"), (DOWN, "other", "the task of 'other'")):
        reply, params = answer(scope, update, method)
        assert reply.status == ERROR and not params and said in reply.reason
