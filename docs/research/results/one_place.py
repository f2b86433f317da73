"""Two hospitals of 96 patients as one, with patient adapters: `python docs/research/results/one_place.py OUT [told]`.

All patients are in the split of their own hospital, and as many updates are made as both make. With `told` the
patients' profile says the hospital: 10 is added to the sex of the second one's patients.
"""

import sys
from pathlib import Path

from fedtar_flare.data.cohort import Cohort
from fedtar_flare.methods.fedtar import demographics
from fedtar_flare.site import cohort
from fedtar_flare.suite.file import Suite
from fedtar_flare.suite.page import write_page
from fedtar_flare.suite.plan import experiments
from fedtar_flare.suite.run import run_suite

load, profiles = cohort.load_cohort, demographics.profiles


def load_both(config, site_name, **options):
    """The patients of both hospitals as those of one."""
    both = [load(config, name, **options) for name in ("site-1", "site-2")]
    patients = [patient for one in both for patient in one.patients]
    splits = {sample.visit.patient_id: sample.split for one in both for sample in one.samples(None)}
    return Cohort(site_name, patients, key=both[0].key, timeline=both[0].timeline, splits=splits)


def told(samples, key, median_age, fields):
    """Profiles that say the hospital."""
    rows = profiles(samples, key, median_age, fields)
    rows[:, fields.index("sex")] += [10.0 * sample.visit.patient_id.startswith("site-2") for sample in samples]
    return rows


cohort.load_cohort = load_both
if "told" in sys.argv:
    demographics.profiles = told
label = "all patients in one place with patient adapters"
arm = {"method": "local_patient", "label": label, "settings": {"training": {"local_steps": 96}}}
size = {"num_rounds": 3, "data": {"synthetic_patients": 96}}
suite = Suite(name="one place", sites=("site-1",), seeds=(0, 1, 2), settings=size, arms={"one_place": arm})
planned = experiments(suite)
run_suite(Path(sys.argv[1]), planned)
print(write_page(Path(sys.argv[1]), suite, planned))
