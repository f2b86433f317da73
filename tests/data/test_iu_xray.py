import pytest
from tables import write_table

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.data.sources.fields import DAY_ZERO
from fedtar_flare.data.sources.iu_xray import read_iu_xray

SINGLE = {"undated": "single"}
XML = """<?xml version="1.0" encoding="utf-8"?>
<eCitation><uId id="CXR{n}"/><MedlineCitation><Article><Abstract>
<AbstractText Label="COMPARISON">None.</AbstractText>
<AbstractText Label="INDICATION">Positive TB test</AbstractText>
<AbstractText Label="FINDINGS">{findings}</AbstractText>
<AbstractText Label="IMPRESSION">Normal chest x-XXXX.</AbstractText>
</Abstract></Article></MedlineCitation>
<parentImage id="CXR{n}_1_IM-0001-3001"><caption>Xray Chest PA and Lateral</caption></parentImage>
<parentImage id="CXR{n}_1_IM-0001-4001"><caption>Xray Chest PA and Lateral</caption></parentImage>
</eCitation>"""


def report(uid, findings="The heart is normal.", impression="Normal chest."):
    head = {"uid": uid, "MeSH": "normal", "Problems": "normal", "image": "Xray Chest PA and Lateral"}
    return head | {"indication": "TB", "comparison": "None.", "findings": findings, "impression": impression}


@pytest.fixture
def tables(tmp_path):
    def write(reports, projections, absent=()):
        for name, rows in (("indiana_reports.csv", reports), ("indiana_projections.csv", projections)):
            write_table(tmp_path / name, rows)
        folder = tmp_path / "images" / "images_normalized"
        folder.mkdir(parents=True, exist_ok=True)
        for row in projections:
            if row["filename"] not in absent:
                (folder / row["filename"]).touch()
        return tmp_path

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


def test_every_view(tables):
    root = tables([report("1"), report("2")], [radiograph("1", "b.png"), radiograph("1", "a.png", "Lateral")])
    reading = read_iu_xray(root, {"undated": "single", "views": "all"})
    assert {v.visit_id for p in reading.patients() for v in p.visits} == {"1-a", "1-b"}
    assert reading.rejected() == {"not-frontal-radiograph": 1}


def test_the_xml_files(tmp_path, caplog):
    (tmp_path / "ecgen-radiology").mkdir()
    (tmp_path / "NLMCXR_png").mkdir()
    for n in ("1", "2"):
        text = XML.format(n=n, findings="The <b>heart</b> is\n normal &amp; small.")
        (tmp_path / "ecgen-radiology" / f"{n}.xml").write_text(text)
        for image in ("3001", "4001"):
            (tmp_path / "NLMCXR_png" / f"CXR{n}_1_IM-0001-{image}.png").touch()
    (tmp_path / "ecgen-radiology" / "3.xml").write_text("<eCitation>")
    reading = read_iu_xray(tmp_path, {**SINGLE, "sections": ["findings"]})
    one, _ = reading.patients()
    assert one.patient_id == "1" and one.visits[0].report == "The heart is normal & small."
    assert one.visits[0].image.name == "CXR1_1_IM-0001-3001.png" and reading.rejected() == {"unreadable": 1}
    assert "does not tell frontal from lateral" in caplog.text


NESTED = """<eCitation><MedlineCitation><Article><Abstract>
<AbstractText Label="FINDINGS">The heart is normal. <AbstractText Label="IMPRESSION">Normal chest.</AbstractText>
 The lungs are clear.<AbstractText Label="FINDINGS">The lungs are clear.</AbstractText>
<AbstractText Label="INDICATION">Cough <b>and
<AbstractText Label="COMPARISON">None.</AbstractText>fever</b>.</AbstractText>
</AbstractText>
<AbstractText Label="IMPRESSION">Normal chest.</AbstractText>
<AbstractText Label="IMPRESSION">No change.</AbstractText>
</Abstract></Article></MedlineCitation><parentImage id="CXR1_1"/></eCitation>"""


def test_nested_headings_say_nothing_twice(tmp_path):
    (tmp_path / "NLMCXR_png").mkdir()
    (tmp_path / "NLMCXR_png" / "CXR1_1.png").touch()
    (tmp_path / "1.xml").write_text(NESTED)
    sections = ["findings", "impression", "indication", "comparison"]
    (patient,) = read_iu_xray(tmp_path, {**SINGLE, "sections": sections}).patients()
    report = patient.visits[0].report
    for text in ("The heart is normal.", "The lungs are clear.", "Normal chest.", "No change.", "None."):
        assert text in report
    assert report.count("Normal chest.") == report.count("None.") == 1 and "Cough and fever." in report
    assert report.count("The heart is normal.") == report.count("The lungs are clear.") == 1


def test_wrong_layouts_and_options(tables, tmp_path):
    with pytest.raises(ConfigError, match=r"indiana_reports\.csv"):
        read_iu_xray(tmp_path, SINGLE)
    path = tables([report("1")], [radiograph("1", "1.png")])
    for options in ({}, {"undated": "many"}, {"undated": True}):
        with pytest.raises(ConfigError, match="undated: single"):
            read_iu_xray(path, options)
    with pytest.raises(ConfigError, match="nowhere"):
        read_iu_xray(path, {**SINGLE, "images": "nowhere"})
