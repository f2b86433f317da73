import numpy as np
import pytest

from fedtar_flare.synthetic.phantom import Scanner, draw_anatomy, render, site_scanner
from fedtar_flare.synthetic.vocabulary import FINDINGS, NEW_FINDINGS, side_of

CLEAN = Scanner(noise_hu=0.0)


def draw(findings, seed=0, scanner=CLEAN):
    return render(draw_anatomy(np.random.default_rng(seed)), findings, scanner, np.random.default_rng(seed + 1))


def difference(findings, seed=0):
    """HU with the findings minus HU without, same patient, same breath and position."""
    return draw(findings, seed).astype(int) - draw({}, seed)


def test_a_chest_in_hounsfield_units():
    hu = draw({}, scanner=site_scanner(1))
    assert hu.dtype == np.int16 and hu.shape == (24, 80, 80)
    assert hu.min() >= -1024 and hu.max() <= 3071
    assert np.abs(hu[12, :3].mean() + 1000) < 20  # air around
    lung = (hu > -950) & (hu < -700)
    assert 2.5 < lung.sum() * np.prod(Scanner.spacing_mm) / 1e6 < 7  # litres of both lungs
    assert lung[:, :, :40].any() and lung[:, :, 40:].any()
    assert (hu > 300).mean() > 0.005  # bone
    assert (hu[17, 40:50, 36:44] < -900).any()  # trachea: air in the midline of upper slices


@pytest.mark.parametrize("name", [name for name in FINDINGS if side_of(name)])
def test_a_sided_finding_is_dense_or_dark_and_on_its_side(name):
    change = difference({name: 2})
    touched = change < -120 if name.startswith("pneumo") else change > 200
    halves = [half.sum() for half in np.split(touched, 2, axis=2)]  # the patient's right is on the left
    other, same = sorted(halves)
    assert (halves[0] == same) == name.endswith("right") and same > 20 and other <= 0.02 * same


@pytest.mark.parametrize("name", NEW_FINDINGS)
def test_a_new_finding_hides_no_known_one(name):
    known = {"effusion_left": 2, "nodule_right": 3}
    both = draw({name: 2, **known}).astype(int) - draw({name: 2})
    assert (both > 200).sum() > 0.6 * (difference(known) > 200).sum()


def test_a_patient_keeps_anatomy_and_positions_over_visits():
    anatomy = draw_anatomy(np.random.default_rng(0))
    centers = []
    for visit in range(4):
        sick, well = (render(anatomy, f, CLEAN, np.random.default_rng(visit)) for f in ({"nodule_right": 2}, {}))
        centers.append(np.mean(np.nonzero(sick.astype(int) - well > 300), axis=1) * CLEAN.spacing_mm)
    assert np.ptp(centers, axis=0).max() < 15  # breath and position only
    other = draw_anatomy(np.random.default_rng(1))
    assert other.chest != anatomy.chest and other.positions != anatomy.positions
