"""Which scores of a site raise which alarm."""

import pytest
from tables import cases

from fedtar_flare.record.events import SiteScores
from fedtar_flare.reporting.alarms import alarms

NATURAL = {"identical_share": 0.1, "mismatched_share": 0.1, "length_ratio": 1.0, "contradictions": 0.3}


def site(recall=None, precision=None, references=0.1, **scores):
    """A site's scores; recall and precision are of a finding that the warm start knows."""
    shares = {"n": 20, "recall": recall, "named": 20, "precision": precision}
    known = {"nodule": {name: value for name, value in shares.items() if value is not None}}
    of_references = {"identical_share": references, "contradictions": 0.25}
    return SiteScores(all=NATURAL | scores, references=of_references, findings={"known": known})


@pytest.mark.parametrize(("now", "start", "raised"), cases(__file__, "alarms.yaml"))
def test_what_raises_which_alarm(now, start, raised):
    of_site = alarms(site(**now), site(**start) if start else None)
    assert {name for name, alarm in of_site.items() if alarm.raised} == {*raised}


def test_without_its_numbers_an_alarm_is_left_out():
    unknown = SiteScores(all={"mismatched_share": None, "identical_share": 1.0})
    assert alarms(None, site()) == alarms(unknown, site()) == {}
    assert not {"finding_recall", "invented_findings"} & {*alarms(site(recall=0.5, precision=0.5), SiteScores())}
