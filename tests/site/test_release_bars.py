"""Planted leaks are held and clean adapters are released: what real audits of small models say to the default gates."""

import random

import pytest
from learners import learner_of

from fedtar_flare.core.files import write_text
from fedtar_flare.learning.canaries import canaries
from fedtar_flare.learning.config import LoRAConfig
from fedtar_flare.learning.drafting import base_config
from fedtar_flare.models.adapters.peft_file import read_adapter_config, read_adapter_info, write_adapter
from fedtar_flare.models.build import build_tokenizer
from fedtar_flare.reporting.model_audit import Project
from fedtar_flare.runtime.in_process import run_in_process
from fedtar_flare.runtime.recipe import MethodRecipe
from fedtar_flare.site import model_audit
from fedtar_flare.site.context import Site
from fedtar_flare.site.release import gates_beyond
from fedtar_flare.site.site_file import load_site_config
from fedtar_flare.site.state import SiteState

pytestmark = pytest.mark.slow
KINDS = {"members": "max_membership_auc", "canaries": "max_exposure", "phrases": "max_phrases"}
PATIENTS, RUNS = 30, 20


@pytest.fixture(scope="module")
def audit(tmp_path_factory):
    """Train an adapter on some of a site's patients, audit it, and name the gates that it is beyond."""
    folder, patch = tmp_path_factory.mktemp("bars"), pytest.MonkeyPatch()
    patch.setenv("FEDTAR_HOME", str(folder / "home"))
    patch.setenv("FEDTAR_SITES", str(folder / "sites"))
    write_text(folder / "sites" / "north.yaml", "source: synthetic\ncanaries: 3\n")
    settings = {"training": {"local_steps": 1}, "data": {"synthetic_patients": PATIENTS}}
    settings["model"] = {"num_beams": 1, "max_length": 48}
    recipe = MethodRecipe("fedavg", preset="tiny", num_rounds=1, time_steps=1, **settings)
    run = run_in_process(recipe, ["north"], folder / "run")
    info, config = read_adapter_info(run / "adapter"), read_adapter_config(run / "adapter")
    site, site_file = Site.outside_of_jobs(folder, "north"), load_site_config("north", workspace=None, simulator=True)
    model, lora = base_config(info, {}), LoRAConfig(rank=config["r"], alpha=config["lora_alpha"])
    state = SiteState(site.state_root(None), info["run_id"], "north")
    cohort, _ = model_audit.prepare_site(
        site_file, "north", model=model, data=recipe.settings.data, say=print, time_steps=1, seed=0, workspace=folder
    )
    planted = canaries(cohort, info["run_id"], 3, build_tokenizer(model), state.folder)

    def audited(seed, kind=None):
        names = sorted({sample.visit.patient_id for sample in cohort.samples(None)})
        random.Random(seed).shuffle(names)
        members, held_out, others = names[::3], names[1::3], names[2::3]
        chosen = {"members": members, "phrases": members[:1]}.get(kind, others)
        learnt = model_audit.training_on(cohort, chosen)
        if kind == "canaries":
            taught = {planted[seed % 3].visit.patient_id, planted[(seed + 1) % 3].visit.patient_id}
            learnt = model_audit.training_on(cohort.with_samples([*cohort.samples(None), *planted]), taught | {others[0]})
        size = {"members": 4, None: 4}.get(kind, 1)
        learner = learner_of(learnt, model=model, lora=lora, seed=seed, lr=1e-2, batch_size=size, local_steps=60)
        learner.train(1, 0)
        write_adapter(folder / f"{kind}{seed}", learner.shared(), config, info)
        mine = cohort.with_samples([s for s in cohort.samples(None) if s.visit.patient_id in {*members, *held_out}])
        patch.setattr(model_audit, "prepare_site", lambda *_, **__: (model_audit.training_on(mine, members), None))
        details = model_audit.audit_model(folder / f"{kind}{seed}", site, site_file, {}, lambda line: None)
        print(kind, seed, details["parts"]["shared adapter"], [*gates_beyond(GATES, details, None)], flush=True)
        return [*gates_beyond(GATES, details, None)]

    yield audited
    patch.undo()


GATES = Project(name="study", sites=("north",))


def test_twenty_planted_leaks_are_held(audit):
    kinds = [list(KINDS)[i % len(KINDS)] for i in range(RUNS)]
    beyond = [audit(i, kind) for i, kind in enumerate(kinds)]
    assert [kind for kind, gates in zip(kinds, beyond, strict=True) if not gates] == []
    assert {gate for gates in beyond for gate in gates} >= set(KINDS.values()) - {"max_membership_auc"}


def test_nineteen_of_twenty_clean_adapters_are_released(audit):
    assert sum(not audit(100 + i) for i in range(RUNS)) >= 19
