"""Transforms that a lead adds to a job: training, scoring and drafting see what they make of images."""

import nibabel
import numpy as np
import pytest
from hospital_site import SETTINGS
from kits import whole

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.imaging.transforms import preparation
from fedtar_flare.learning.drafting import Drafter
from fedtar_flare.learning.study import study_of
from fedtar_flare.methods.fedtar.recipe import FedTARRecipe
from fedtar_flare.models.adapters.peft_file import read_adapter_info
from fedtar_flare.runtime.simulation import run_in_process
from fedtar_flare.site.site_file import read_site_file
from fedtar_flare.testing import Hospital, executor_of

SMOOTH = {"name": "GaussianSmoothd", "sigma": 3.0}
NOISE = {"name": "RandGaussianNoised", "prob": 1.0, "std": 0.2}
TRAINING = {**SETTINGS["training"], "local_steps": 1}
pytestmark = pytest.mark.usefixtures("site_files")


def site_with(tmp_path, *transforms):
    return Hospital(tmp_path, fresh=False, training=TRAINING, data={**SETTINGS["data"], "transforms": list(transforms)})


def test_a_transform_that_the_site_allows_changes_what_training_sees_and_a_random_one_training_alone(tmp_path):
    loss, validation, splits = {}, {}, set()
    for name, transforms in {"plain": (), "noise": (NOISE,), "smooth": (SMOOTH,), "both": (SMOOTH, NOISE)}.items():
        site = site_with(tmp_path, *transforms)
        assert site.handshake(name)[0].status == "ok"
        learner = site.executor.strategy.learner
        splits.add(tuple(sample.split for sample in learner.cohort.samples(None)))
        validation[name], loss[name] = learner.validate().loss, learner.train(1, 5).loss
    assert len(set(loss.values())) == 4 and len(splits) == 1
    assert validation["plain"] == validation["noise"] != validation["smooth"] == validation["both"]


def test_a_draft_is_written_of_what_training_saw(tmp_path):
    recipe = FedTARRecipe(
        preset="tiny", num_rounds=1, time_steps=1, model={"max_length": 16, "num_beams": 1}, training=TRAINING,
        data={"synthetic_patients": 6, "transforms": [SMOOTH, NOISE]},
    )  # fmt: skip
    adapter = run_in_process(recipe, ["site-1"], tmp_path / "run") / "adapter"
    assert read_adapter_info(adapter)["transforms"] == [SMOOTH]
    site = site_with(tmp_path)
    site.handshake()
    study = study_of(site.executor.strategy.learner.cohort.visits[0].image)
    drafter = Drafter(adapter)
    made = preparation("ct", recipe.executor.strategy.settings.model, [SMOOTH])({"image": str(study.image)})
    assert np.array_equal(drafter._image(study).images[0].numpy(), made["image"])
    drafter.info["transforms"] = [{"name": "Lambdad"}]
    with pytest.raises(ConfigError, match="not 'Lambdad'"):
        drafter._image(study)


@pytest.mark.parametrize(("large", "declined"), [(1, True), (4, True), (5, False), (0, False)])
def test_a_job_s_transforms_leave_out_images_of_enough_patients_or_of_none(tmp_path, large, declined):
    """A distance of voxels at which the largest patient alone was left out told that patient by subtraction."""
    rows = ["patient_id,study_datetime,image,report,age,sex"]
    for n in range(12):
        side = 24 if n < large else 20
        values = np.random.default_rng(n).integers(-1000, 0, (side,) * 3).astype(np.int16)
        nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), tmp_path / f"{n}.nii")
        rows.append(f"p{n},2020-01-01,{n}.nii,Clear.,50,F")
    (tmp_path / "manifest.csv").write_text("\n".join(rows))
    text = "source: manifest\npath: manifest.csv\nstate_dir: state\ncache_dir: cache\nlimits: {voxels: 30000}\n"
    (file := tmp_path / "real.yaml").write_text(whole(text))
    data = {"transforms": [{"name": "Spacingd", "pixdim": 0.75}]}
    strategy, config = executor_of("fedavg", "tiny", data=data).strategy, read_site_file(file)
    if declined:
        with pytest.raises(ConfigError):
            strategy.patients(config, "real", 1)
    else:
        assert len(strategy.patients(config, "real", 1).visits) == 12 - large
