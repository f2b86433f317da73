"""What ``fedtar status`` prints of a job: the shared progress, and whatever numbers the method adds."""

from fedtar_flare.provision.status import line

JOB = {"id": "1f", "status": "RUNNING", "name": "night"}
PROGRESS = {
    "task": "train",
    "round": 2,
    "rounds": 5,
    "step": 1,
    "time_steps": 3,
    "seconds": 61.4,
    "sites": {"north": "done", "south": "asked"},
    "validation_loss": {"1": 0.75, "10": 0.5},
    "numbers": {},
}


def test_how_far_a_job_is_with_the_newest_loss():
    assert line(JOB | {"progress": PROGRESS}).splitlines() == [
        "1f  RUNNING                night",
        "  train: round 2 of 5, step 1 of 3, 61 s; north done, south asked; validation loss 0.5000",
    ]


def test_the_numbers_of_any_method_are_printed_under_their_labels():
    numbers = {"alpha": [0.25, 0.75], "experts at north": [3]}
    said = line(JOB | {"progress": PROGRESS | {"numbers": numbers}})
    assert "; alpha 0.250 0.750; experts at north 3.000; validation loss" in said


def test_a_job_that_waits_has_one_line():
    assert line(JOB) == line(JOB | {"progress": {"task": ""}}) == "1f  RUNNING                night"
