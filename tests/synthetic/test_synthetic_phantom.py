import itertools
from dataclasses import replace

import numpy as np
import pytest

from fedtar_flare.synthetic.phantom import draw_anatomy, render
from fedtar_flare.synthetic.scanner import Scanner, site_scanner
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
    middle = hu[12]
    assert np.abs(middle[:3].mean() + 1000) < 20  # air around
    lung = (hu > -950) & (hu < -700)
    litres = lung.sum() * np.prod(Scanner.spacing_mm) / 1e6
    assert 2.5 < litres < 7  # both lungs
    assert (hu > 300).mean() > 0.005  # bone
    # trachea: air in the midline of upper slices, within soft tissue
    assert (hu[17, 40:50, 36:44] < -900).any()
    assert lung[:, :, :40].sum() > 0 and lung[:, :, 40:].sum() > 0


@pytest.mark.parametrize("name", [name for name in FINDINGS if side_of(name)])
def test_a_sided_finding_is_dense_or_dark_and_on_its_side(name):
    change = difference({name: 2})
    touched = change < -120 if name.startswith("pneumo") else change > 200
    half = change.shape[2] // 2
    right, left = touched[:, :, :half].sum(), touched[:, :, half:].sum()
    mine, other = (right, left) if name.endswith("right") else (left, right)
    assert mine > 20 and other <= 0.02 * mine


@pytest.mark.parametrize("name", FINDINGS)
def test_sizes_differ_visibly(name):
    for seed in range(2):
        sizes = [(np.abs(difference({name: size}, seed)) > 100).sum() for size in (1, 2, 3)]
        assert sizes[0] > 10
        assert all(larger > 1.25 * smaller for smaller, larger in itertools.pairwise(sizes))


def test_effusion_lies_at_the_back_and_base_and_consolidation_is_denser():
    z, y, _ = np.nonzero(difference({"effusion_left": 2}) > 300)
    assert y.mean() > 45 and z.mean() < 10
    fluid = draw({"effusion_left": 3})[difference({"effusion_left": 3}) > 700]
    assert abs(np.median(fluid) - 10) < 8
    dense = draw({"consolidation_left": 3})[difference({"consolidation_left": 3}) > 700]
    assert 25 < np.median(dense) < 45


@pytest.mark.parametrize("seed", range(2))
def test_a_cavity_has_a_wall_and_air_in_it_and_pericardial_fluid_lies_around_the_heart(seed):
    change, hu = difference({"cavity": 3}, seed), draw({"cavity": 3}, seed)
    z, y, x = (round(float(axis.mean())) for axis in np.nonzero(change > 600))
    assert hu[z, y, x] < -940 and (change[z] > 600).sum() > 15 and z > 11
    fluid = draw({"pericardial_effusion": 2}, seed)[difference({"pericardial_effusion": 2}, seed) > 500]
    assert abs(np.median(fluid) - 10) < 8
    apart = np.abs(draw({"pericardial_effusion": 2}, seed).astype(int) - draw({"cardiomegaly": 2}, seed))
    assert (apart > 80).sum() > 150  # no large heart


@pytest.mark.parametrize("name", NEW_FINDINGS)
def test_a_new_finding_hides_no_known_one(name):
    both = draw({name: 2, "effusion_left": 2, "nodule_right": 3}).astype(int) - draw({name: 2})
    alone = difference({"effusion_left": 2, "nodule_right": 3})
    assert (both > 200).sum() > 0.6 * (alone > 200).sum()


def test_emphysema_is_dark_and_expands_the_lungs():
    change = difference({"emphysema": 3})
    assert (change < -120).sum() > 20 * (change > 400).sum()
    assert (draw({"emphysema": 3}) < -930).sum() > (draw({}) < -930).sum()
    lung = [((draw(f) < -500) & (draw(f) > -998)).sum() for f in ({}, {"emphysema": 3})]
    assert lung[1] > lung[0]


def test_a_patient_keeps_anatomy_and_place_over_visits():
    anatomy = draw_anatomy(np.random.default_rng(0))
    centers = []
    for visit in range(4):
        rng = np.random.default_rng(100 + visit)
        with_nodule = render(anatomy, {"nodule_right": 2}, CLEAN, rng).astype(int)
        without = render(anatomy, {}, CLEAN, np.random.default_rng(100 + visit))
        centers.append(np.mean(np.nonzero(with_nodule - without > 300), axis=1) * CLEAN.spacing_mm)
    assert np.ptp(centers, axis=0).max() < 15  # breath and position only
    other = draw_anatomy(np.random.default_rng(1))
    assert other.chest != anatomy.chest and other.places != anatomy.places


def test_scanners_differ():
    sites = [site_scanner(style) for style in range(1, 7)]
    assert len(set(sites)) == 6 and site_scanner(7) == sites[0]
    air = [draw({}, scanner=replace(CLEAN, noise_hu=noise))[:, :3, :3].std() for noise in (10.0, 30.0)]
    assert air[1] > 1.5 * air[0]
