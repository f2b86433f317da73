import pytest
from tables import lay

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.data.sources.fields import DAY_ZERO
from fedtar_flare.data.sources.iu_xray import read_iu_xray

SINGLE = {"undated": "single"}


def report(uid, findings="The heart is normal.", impression="Normal chest."):
    head = {"uid": uid, "MeSH": "normal", "Problems": "normal", "image": "Xray Chest PA and Lateral"}
    return head | {"indication": "TB", "comparison": "None.", "findings": findings, "impression": impression}


@pytest.fixture
def tables(tmp_path):
    def write(reports, projections, absent=()):
        names = {row["filename"] for row in projections} - {*absent}
        images = [f"images/images_normalized/{name}" for name in names]
        return lay(tmp_path, {"indiana_reports.csv": reports, "indiana_projections.csv": projections}, images)

    return write


def radiograph(uid, name, projection="Frontal"):
    return {"uid": uid, "filename": name, "projection": projection}


def test_the_tables(tables):
    path = tables(
        [report("1"), report("2", findings=""), report("3"), report("4", "", ""), report("5"), report("1", "Again.")],
        [radiograph("1", "1_IM-0001-4001.dcm.png", "Lateral"), radiograph("1", "1_IM-0001-3001.dcm.png"),
         radiograph("2", "2_b.png"), radiograph("2", "2_a.png"), radiograph("3", "3.png", "Lateral"),
         radiograph("4", "4.png"), radiograph("5", "5.png")],
        absent=["5.png"],
    )  # fmt: skip
    reading = read_iu_xray(path, SINGLE)
    one, two = reading.patients()
    assert one.visits[0].image == path / "images/images_normalized/1_IM-0001-3001.dcm.png"
    assert one.visits[0].report == "The heart is normal.\nNormal chest." and one.visits[0].acquired == DAY_ZERO
    assert one.sex is None and one.visits[0].age is None and len(one.visits) == 1
    assert two.visits[0].report == "Normal chest." and two.visits[0].image.name == "2_a.png"
    assert reading.rejected() == {"duplicate-visit": 1, "no-image": 1, "no-section": 1, "not-frontal-radiograph": 1}
    one, *_ = read_iu_xray(path, SINGLE | {"views": "all"}).patients()
    assert {v.visit_id for v in one.visits} == {"1-1_IM-0001-4001.dcm", "1-1_IM-0001-3001.dcm"}


def test_wrong_layouts_and_options(tables, tmp_path):
    with pytest.raises(ConfigError, match=r"indiana_projections\.csv"):
        read_iu_xray(tmp_path, SINGLE)
    path = tables([report("1")], [radiograph("1", "1.png")])
    for options in ({}, {"undated": "many"}, {"undated": True}):
        with pytest.raises(ConfigError, match="undated: single"):
            read_iu_xray(path, options)
    with pytest.raises(ConfigError, match="nowhere"):
        read_iu_xray(path, {**SINGLE, "images": "nowhere"})
