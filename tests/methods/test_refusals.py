"""Settings of a method that cannot be fail when the job is made, and the error names them."""

import pytest

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.testing import executor_of

PERIODS = {"alignment": "period", "periods": ["2020-01-01", "2021-01-01", "2022-01-01"]}
MEDIAN = {"server": {"aggregation": "median"}, "min_sites": 3}
REFUSED = [
    ("fedtar", {"preset": "smal"}, "small"),
    ("fedtar", {"training": {"lrr": 1}}, "lr"),
    ("fedtar", {"lora": {"rank": 0}}, "rank"),
    ("fedtar", {"patient": {"profile": ["sex"]}}, "profile"),
    ("fedtar", {"patient": {"scal": 1.0}}, "did you mean 'scale'"),
    ("fedtar", {"patients": {"scale": 1.0}}, "patients"),
    ("fedtar", {"server": {"etta": 1}}, "etta"),
    ("fedtar", {"server": {"eta": 0.0}}, "eta"),
    ("fedtar", {"torch_threads": 0}, "torch_threads"),
    ("fedtar", {"data": {"periods": ["2020-01-01", "2019-01-01"]}}, "periods"),
    *(("fedtar", {"time_steps": 3, "data": PERIODS | {"periods": PERIODS["periods"][:n]}}, "2 rising dates")
      for n in (0, 1, 3)),
    ("local_patient", {"patient": {"local_adapter": True}}, r"patient\.local_adapter"),
    ("local_patient", {"diagnosis": {"labeler": "synthetic", "shared": True}}, r"diagnosis\.shared"),
    ("scaffold", {"lora": {"exchange": ["projection.*"]}}, "exchange.*adapter only"),
    *((name, {"lora": {"mean": "ffa"}}, r"lora\.mean: ffa") for name in ("scaffold", "fedadam", "fedpeft", "fedmrg")),
    ("fedavg", {"lora": {"mean": "product"}, **MEDIAN}, "products can only be averaged"),
    ("fedpeft", {"peft": {"kind": "none"}}, r"lora\.exchange"),
    ("fedpeft", {"peft": {"kind": "lora"}}, "kind"),
    ("fedpeft", {"peft": {"kind": "vera", "target_rank": 2}}, "target_rank"),
    ("fedpeft", {"peft": {"prompts": 0}}, "prompts"),
    ("fedpeft", {"peft": {"target_rank": 4}}, r"lora\.rank 4"),
    ("fedpeft", {"lora": {"rank": 1}}, r"lora\.rank 1"),
    ("fedkei", {"preset": "paper"}, "unknown to fedkei"),
    ("fedkei", {"training": {"epochs": 100}}, "epochs is 100"),
    ("fedkei", {"training": {"local_steps": 3}}, "local_steps"),
    ("fedkei", {"data": {"prior": "image"}}, "prior"),
    ("fedkei", {"model": {"rank": 0}}, "rank"),
    ("fedkei", {"lora": {"rank": 2}}, "lora: .*no such group"),
    ("fedkei", {"time_steps": 3}, "time_steps is 3"),
    ("fedkei", {"num_rounds": 9}, "num_rounds is 9"),
    ("fedkei", {"server": {"initial_checkpoint": "x"}}, "initial_checkpoint"),
    ("fedkei", {"fedkei": {"plan": "fedkie"}}, "did you mean 'fedkei'"),
    ("fedkei", {"fedkei": {"tasks": ["a", "a"]}}, "tasks"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "settings", "word"), REFUSED)
def test_settings_that_cannot_be_are_refused_when_the_job_is_made(method, settings, word):
    with pytest.raises(ConfigError, match=word):
        (executor_of if "torch_threads" in settings else MethodRecipe)(method, **settings)
