"""The job fedprox, as code: `python job.py` simulates it; see `python job.py --help`."""

from fedtar_flare import MethodRecipe, run_job

recipe = MethodRecipe(
    "fedprox",
    preset="small",
    num_rounds=2,
    time_steps=3,
    seed=0,
    torch_threads=1,
)

if __name__ == "__main__":
    run_job(recipe)
