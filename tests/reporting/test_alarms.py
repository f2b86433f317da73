"""Which scores of a site raise which alarm."""

import pytest

from fedtar_flare.record.events import SiteScores
from fedtar_flare.reporting.alarms import alarms

NATURAL = {"identical_share": 0.1, "mismatched_share": 0.1, "length_ratio": 1.0, "contradictions": 0.3}


def site(recall=None, precision=None, references=0.1, **scores):
    """A site's scores; recall and precision are of a finding that the warm start knows."""
    shares = {"n": 20, "recall": recall, "named": 20, "precision": precision}
    known = {"nodule": {name: value for name, value in shares.items() if value is not None}}
    of_references = {"identical_share": references, "contradictions": 0.25}
    return SiteScores(all=NATURAL | scores, references=of_references, findings={"known": known})


@pytest.mark.parametrize(
    ("now", "start", "raised"),
    [
        (site(), None, set()),
        (site(identical_share=1.0, mismatched_share=0.5), None, {"identical_share", "mismatched_share"}),
        (
            site(identical_share=1.0, references=1.0),
            None,
            set(),
        ),  # where references are alike, drafts may be
        (site(length_ratio=2.0), None, {"length_ratio"}),
        (site(length_ratio=0.1), None, {"length_ratio"}),
        (site(contradictions=0.36), None, {"contradictions"}),
        (site(recall=0.5, precision=1.0), site(recall=0.9, precision=1.0), {"finding_recall"}),
        (site(recall=0.89, precision=0.96), site(recall=0.9, precision=0.97), set()),
        (site(recall=0.9, precision=0.85), site(recall=0.9, precision=0.97), {"invented_findings"}),
    ],
)
def test_what_raises_which_alarm(now, start, raised):
    assert {name for name, alarm in alarms(now, start).items() if alarm.raised} == raised


def test_without_its_numbers_an_alarm_is_left_out():
    assert (
        alarms(None, site()) == alarms(SiteScores(all={"mismatched_share": None, "identical_share": 1.0}), None) == {}
    )
    assert not {"finding_recall", "invented_findings"} & {*alarms(site(recall=0.5, precision=0.5), SiteScores())}
