import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtar_flare.metrics.auc_draws import auc_of_draws
from fedtar_flare.metrics.classification import auc


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000))
def test_a_drawn_patient_counts_as_often_as_it_was_drawn(seed):
    draw = np.random.default_rng(seed)
    many, patients = int(draw.integers(2, 14)), int(draw.integers(1, 6))
    labels, places = draw.integers(0, 2, many), draw.integers(0, patients, many)
    scores = draw.integers(0, 4, (many, 3)) / 4
    draws = draw.multinomial(patients, [1 / patients] * patients, 5).astype(float)
    found = auc_of_draws(labels.tolist(), scores, places.tolist(), draws)
    for r, counts in enumerate(draws):
        repeated = np.repeat(np.arange(many), counts[places].astype(int))
        for column in range(3):
            wanted = auc(labels[repeated], scores[repeated, column])
            assert np.isnan(found[r, column]) if wanted is None else np.isclose(found[r, column], wanted)
