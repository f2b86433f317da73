"""Tasks in sequence: orders, who is positive, negative or left out, and what is told of a split."""

from datetime import datetime
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtar_flare.data.cells import Timeline
from fedtar_flare.data.cohort import Cohort, Patient, Sample, Visit
from fedtar_flare.methods.fedkei.tasks import TaskStream, order_of, without_some

TASKS = ("nodule", "effusion", "mass=tumour|metastasis")
LABELS = ("nodule", "effusion", "tumour", "metastasis", "other")


def visit(*labels, unsure=(), patient="p", known=True):
    about = {"labels": frozenset(labels) if known else None, "uncertain": frozenset(unsure)}
    return Visit(patient, "v", datetime(2020, 1, 1), Path("/x.png"), "A report.", "radiograph", **about)


def sample(*labels, patient="p"):
    return Sample(visit(*labels, patient=patient), None, None, 1, "train")


def rules(report):
    assert report == "A report."
    return frozenset({"nodule"}), frozenset({"effusion"})


STREAM, BY_RULES = TaskStream(TASKS), TaskStream(TASKS, from_report=rules)
BASED = TaskStream(("bcc", "akiec"), base=("melanoma",))
BOTH = TaskStream(("bcc", "akiec"), base=("melanoma", "none"))


@pytest.mark.parametrize(
    "stream, seen, labels",
    [
        (STREAM, visit("nodule"), [1, 0, 0]),
        (STREAM, visit("effusion"), [None, 1, 0]),
        (STREAM, visit("metastasis"), [None, None, 1]),
        (STREAM, visit(), [0, 0, 0]),  # nothing at all is the base
        (STREAM, visit("nodule", "effusion"), [1, 1, 0]),
        (STREAM, visit("nodule", unsure=["effusion"]), [1, None, 0]),  # left out of that task alone
        (STREAM, visit(unsure=["tumour"]), [None, None, None]),  # it may show something, so it is not the base
        (STREAM, visit(known=False), [None, None, None]),
        (BY_RULES, visit(known=False), [1, None, 0]),
        (BY_RULES, visit(), [0, 0, 0]),  # the source's own labels go first
        (BASED, visit("melanoma"), [0, 0]),
        (BASED, visit(), [None, None]),
        (BASED, visit("other"), [None, None]),
        (BOTH, visit("melanoma"), [0, 0]),
        (BOTH, visit(), [0, 0]),
    ],
)
def test_labels_of_a_visit_by_task(stream, seen, labels):
    assert [stream.label_of(seen, step) for step in range(1, len(labels) + 1)] == labels


@given(st.sets(st.sampled_from(LABELS)), st.sets(st.sampled_from(LABELS)), st.integers(1, 3))
def test_positive_means_the_new_disease_and_negative_that_it_is_not_there(labels, unsure, step):
    stream = TaskStream(TASKS)
    label, new = stream.label_of(visit(*labels, unsure=unsure - labels), step), stream.task(step).labels
    assert (label == 1) is bool(labels & new)
    assert label != 0 or not (labels | unsure) & new


@given(st.integers(1, 12), st.sampled_from(("synchronous", "reversed", "shuffled")), st.text("ab", max_size=3))
def test_an_order_is_a_permutation_that_site_and_seed_decide(count, order, site):
    indices = order_of(count, order, site, seed=3)
    assert sorted(indices) == list(range(count)) and indices == order_of(count, order, site, seed=3)
    assert order != "synchronous" or indices == tuple(range(count))
    assert order != "reversed" or indices == tuple(reversed(range(count)))
    assert len({order_of(6, "shuffled", f"{site}{i}", seed=3) for i in range(8)}) > 4, "sites differ"


def test_patients_are_counted_once_and_classes_of_too_few_are_not_reported():
    stream = TaskStream(("nodule",))
    samples = [sample("nodule", patient="a"), sample("nodule", patient="a"), sample(patient="b"), sample(patient="c")]
    examples = stream.examples([*samples, sample("other", patient="d")], 1)
    assert examples.labels.tolist() == [1, 1, 0, 0] and examples.patients == ["a", "a", "b", "c"]
    assert examples.patients_of(1) == {"a"} and examples.enough(1) and not examples.enough(2)
    assert examples.counts(1) == [2, 2] and examples.counts(2) == [2, 0]


LABELLED = st.lists(st.tuples(st.integers(0, 30), st.sets(st.sampled_from(LABELS), max_size=3)), max_size=60)


@given(LABELLED, st.integers(1, 6))
def test_no_two_tasks_differ_in_fewer_patients_than_the_smallest_cell(labelled, least):
    """Plain gradients of one task, less those of the other, gave a single patient's with cosine 1.0."""
    pool = [sample(*labels, patient=f"p{p}") for p, labels in labelled]
    tasks = []
    for step in range(1, len(STREAM) + 1):
        made = STREAM.examples(pool, step, least)
        labels = zip(map(id, made._samples), made.labels.tolist(), strict=True)
        tasks.append(dict(zip(labels, made.patients, strict=True)))
    for one, other in combinations(tasks, 2):
        patients = {(one | other)[key] for key in one.keys() ^ other.keys()}
        assert not patients or len(patients) >= least
        for less, more in ((one, other), (other, one)):  # nor does either have few that the other has not
            more = {key[0] for key in more}
            patients = {patient for (which, _), patient in less.items() if which not in more}
            assert not patients or len(patients) >= least


def test_a_withdrawal_changes_more_of_a_task_than_the_patient():
    moment = datetime(2020, 1, 1)
    people = [Patient(f"p{n}", None, (Visit(f"p{n}", "v", moment, Path(f"{n}"), "x", "ct"),)) for n in range(90)]
    parts = [
        {
            s.visit.patient_id
            for s in without_some(Cohort("a", some, key=bytes(16), timeline=Timeline(1))).samples("train")
        }
        for some in (people, people, people[1:], people[:-1])
    ]
    assert parts[0] == parts[1]
    assert all(len(one ^ other) > 5 for one, other in combinations(parts[1:], 2))
