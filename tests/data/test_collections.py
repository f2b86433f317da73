"""Public collections: visits in the order of dates, their reports and labels, and why others are left out."""

import gzip
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from tables import lay

from fedtar_flare.core.errors import ConfigError
from fedtar_flare.data.sources.chexpert_plus import COLUMNS, SECTIONS, read_chexpert_plus
from fedtar_flare.data.sources.covid_chestxray import read_covid_chestxray
from fedtar_flare.data.sources.ct_rate import read_ct_rate
from fedtar_flare.data.sources.fields import DAY_ZERO
from fedtar_flare.data.sources.iu_xray import read_iu_xray
from fedtar_flare.data.sources.mimic_cxr import read_mimic_cxr

ORDER, SINGLE = {"undated": "order"}, {"undated": "single"}


def plus(patient, study, view, order, **changes):
    """A row of CheXpert Plus."""
    side = "Lateral" if view == "LL" else "Frontal"
    fields = dict.fromkeys([*COLUMNS, *SECTIONS.values()], "")
    fields |= {"path_to_image": f"train/{patient}/{study}/view1_{view}.jpg", "frontal_lateral": side, "ap_pa": view}
    fields |= {"deid_patient_id": patient, "patient_report_date_order": order, "age": "61.0", "sex": "Female"}
    return fields | {"section_findings": "Clear.", "section_impression": "Normal."} | changes


def chexpert_plus(folder, *rows, suffix=".jpg"):
    images = [row["path_to_image"].replace(".jpg", suffix) for row in rows]
    return lay(folder, {"df_chexpert_plus_240401.csv": rows}, images)


@pytest.mark.parametrize("suffix", [".jpg", ".png"])
def test_chexpert_plus_in_the_order_of_its_numbers_which_must_be_asked_for(tmp_path, suffix):
    studies = (("study1", "AP", "2"), ("study1", "PA", "2"), ("study2", "AP", 1), ("study2", "LL", "1"))
    rows = [plus("patient1", *study) for study in studies]
    reading = read_chexpert_plus(chexpert_plus(tmp_path, *rows, suffix=suffix), ORDER)
    (patient,) = reading.patients()
    visits = [(v.visit_id, v.image.name) for v in patient.visits]
    assert visits == [("patient1-study2", f"view1_AP{suffix}"), ("patient1-study1", f"view1_PA{suffix}")]
    assert patient.sex == "F" and patient.visits[0].age == 61
    assert patient.visits[0].report == "Clear.\nNormal." and not reading.rejected()
    (patient,) = read_chexpert_plus(tmp_path, ORDER | {"views": "all"}).patients()
    assert {v.visit_id for v in patient.visits} == {f"patient1-{study}-view1_{view}" for study, view, _ in studies}
    with pytest.raises(ConfigError, match="undated: order"):
        read_chexpert_plus(tmp_path)


def test_unusable_studies_of_chexpert_plus_are_counted(tmp_path):
    studies = (("patient1", "study1", "AP", "1"), ("patient1", "study2", "LL", "2"), ("patient2", "study1", "AP", ""))
    empty = plus("patient3", "study1", "PA", "1", **dict.fromkeys(SECTIONS.values(), ""))
    reading = read_chexpert_plus(chexpert_plus(tmp_path, *(plus(*study) for study in studies), empty), ORDER)
    assert len(reading.patients()) == 1
    assert reading.rejected() == {"empty-report": 1, "no-date": 1, "not-frontal-radiograph": 1}


def openi(uid, findings="The heart is normal.", impression="Normal chest."):
    """A report of IU X-ray."""
    return {"uid": uid, "indication": "TB", "findings": findings, "impression": impression}


def test_iu_xray(tmp_path):
    reports = [openi("1"), openi("2", ""), openi("3"), openi("4", "", ""), openi("5"), openi("1", "Again.")]
    films = {"1_IM-0001-4001.dcm.png": "Lateral", "1_IM-0001-3001.dcm.png": "Frontal", "2_b.png": "Frontal",
             "2_a.png": "Frontal", "3.png": "Lateral", "4.png": "Frontal", "5.png": "Frontal"}  # fmt: skip
    projections = [{"uid": name[0], "filename": name, "projection": projection} for name, projection in films.items()]
    tables = {"indiana_reports.csv": reports, "indiana_projections.csv": projections}
    path = lay(tmp_path, tables, [f"images/images_normalized/{name}" for name in films if name != "5.png"])
    reading = read_iu_xray(path, SINGLE)
    one, two = reading.patients()
    assert one.visits[0].image == path / "images/images_normalized/1_IM-0001-3001.dcm.png"
    assert one.visits[0].report == "The heart is normal.\nNormal chest." and one.visits[0].acquired == DAY_ZERO
    assert one.sex is None and one.visits[0].age is None and len(one.visits) == 1
    assert two.visits[0].report == "Normal chest." and two.visits[0].image.name == "2_a.png"
    assert reading.rejected() == {"duplicate-visit": 1, "no-image": 1, "no-section": 1, "not-frontal-radiograph": 1}
    one, *_ = read_iu_xray(path, SINGLE | {"views": "all"}).patients()
    assert {v.visit_id for v in one.visits} == {"1-1_IM-0001-4001.dcm", "1-1_IM-0001-3001.dcm"}
    for options in ({}, {"undated": "many"}, {"undated": True}):
        with pytest.raises(ConfigError, match="undated: single"):
            read_iu_xray(path, options)


def covid(pid, offset, name, **changes):
    """A row of the COVID-19 chest X-ray collection."""
    fields = {"patientid": pid, "offset": offset, "sex": "F", "age": "54.0", "view": "PA", "modality": "X-ray"}
    fields |= {"location": "Valencia, Spain", "folder": "images", "filename": name, "clinical_notes": "Infiltrates."}
    return fields | {"doi": "", "finding": ""} | changes


@pytest.fixture
def covids(tmp_path):
    def write(*rows, absent=()):
        images = [f"images/{row['filename']}" for row in rows if row["filename"] not in absent]
        return lay(tmp_path, {"metadata.csv": rows}, images)

    return write


def test_visits_are_ordered_by_offset_and_unusable_studies_are_counted(covids):
    path = covids(
        covid("1", "7", "a.png"), covid("1", "-5", "c.png"), covid("1", "0", "b.png", view="AP Supine"),
        covid("1", "1", "h.png", view="L"), covid("1", "2", "i.png", modality="CT", view="Axial"),
        covid("1", "3", "d.png", clinical_notes=" "), covid("1", "4", "e.png"), covid("1", "5", "f.png", age="430"),
        covid("1", "soon", "g.png"), absent=["e.png"],
    )  # fmt: skip
    reading = read_covid_chestxray(path)
    (patient,) = reading.patients()
    assert [v.image.name for v in patient.visits] == ["c.png", "b.png", "a.png"]
    assert [v.acquired - DAY_ZERO for v in patient.visits] == [timedelta(days=d) for d in (-5, 0, 7)]
    assert patient.sex == "F" and patient.visits[0].age == 54 and patient.visits[0].modality == "radiograph"
    once = ("age-out-of-range", "bad-date", "empty-report", "no-image")
    assert reading.rejected() == {"not-frontal-radiograph": 2, **dict.fromkeys(once, 1)}


def test_a_blank_offset_counts_only_for_a_single_radiograph(covids):
    path = covids(
        covid("1", "", "a.png"), covid("2", "", "b.png"), covid("2", "3", "c.png"), covid("3", "", "d.png", sex=""),
        covid("3", "1", "e.png", view="L"),
    )  # fmt: skip
    reading = read_covid_chestxray(path)
    by_id = {p.patient_id: [v.image.name for v in p.visits] for p in reading.patients()}
    assert by_id == {"1": ["a.png"], "2": ["c.png"], "3": ["d.png"]}
    assert reading.rejected() == {"no-date": 1, "not-frontal-radiograph": 1}


def test_sites_by_location_share_no_patient(covids):
    places = ("1", "Valencia, Spain"), ("2", "Melbourne, AUSTRALIA"), ("3", "Milan, Italy"), ("3", "Barcelona, Spain")
    path = covids(*(covid(pid, str(i), f"{i}.png", location=place) for i, (pid, place) in enumerate(places)))
    for location, ids in (("Spain", ["1"]), ("Australia", ["2"]), ("others", ["3"]), (None, ["1", "2", "3"])):
        assert [p.patient_id for p in read_covid_chestxray(path, {"location": location}).patients()] == ids


@pytest.mark.parametrize("notes", ["Infiltrates.", ""])
def test_findings_are_labels_and_without_notes_count_where_asked(covids, notes):
    findings = {"a": "COVID-19, ARDS", "b": "No Finding", "c": "todo", "d": "", "e": "Streptococcus"}
    rows = [covid(n, "1", f"{n}.png", finding=text, clinical_notes=notes) for n, text in findings.items()]
    path = covids(covid("x", "0", "x.png"), *rows)
    assert len(read_covid_chestxray(path).patients()) == (6 if notes else 1)
    reading = read_covid_chestxray(path, {"without_notes": True})
    expected = {"a": {"COVID-19", "ARDS"}, "b": set(), "e": {"Streptococcus"}}
    expected |= {"c": None, "d": None} if notes else {}
    assert {p.patient_id: p.visits[0].labels for p in reading.patients()} == expected | {"x": None}
    assert reading.rejected() == ({} if notes else {"empty-report": 2})


REPORT = "FINAL REPORT\n FINDINGS:\n\n No focal consolidation.\n No effusion.\n IMPRESSION:\n\n No acute process.\n"


def image_row(name, subject="10000032", study="50414267", view="PA", day="21800506", clock="213014.531", rows="3056"):
    values = {"dicom_id": name, "subject_id": subject, "study_id": study, "ViewPosition": view, "Rows": rows}
    return values | {"StudyDate": day, "StudyTime": clock, "Columns": "2544", "ViewCodeSequence_CodeMeaning": ""}


@pytest.fixture
def mimic(tmp_path):
    """Writes the JPG folder and, beside it, the folder of the reports; returns the first."""

    def write(*radiographs, reports=None, absent=(), zipped=False):
        table, studies = "mimic-cxr-2.0.0-metadata.csv", {}
        for f in radiographs:
            study = f"files/p{f['subject_id'][:2]}/p{f['subject_id']}/s{f['study_id']}"
            studies[f"{study}/{f['dicom_id']}.jpg"] = f"{study}.txt", (reports or {}).get(f["study_id"], REPORT)
        images = [image for image in studies if Path(image).stem not in absent]
        root = lay(tmp_path / "jpg", {table: radiographs}, images)
        if zipped:
            (root / f"{table}.gz").write_bytes(gzip.compress((root / table).read_bytes()))
            (root / table).unlink()
        for name, text in studies.values():
            if text is not None:
                lay(tmp_path / "mimic-cxr", {}, [name]).joinpath(name).write_text(text)
        return root

    return write


def read(root, **options):
    return read_mimic_cxr(root, {"reports": "../mimic-cxr", **options})


@pytest.mark.parametrize("zipped", [False, True])
def test_visits_by_shifted_date_with_their_sections(mimic, zipped):
    second = image_row("d2", study="59999999", day="21800401", clock="85320.515")
    third = image_row("d3", study="5", day="21810101", clock="")
    root = mimic(image_row("d1"), second, third, zipped=zipped)
    (patient,) = read(root).patients()
    assert [v.visit_id for v in patient.visits] == ["s59999999", "s50414267", "s5"]
    assert patient.patient_id == "10000032" and patient.sex is None
    first = patient.visits[0]
    assert first.acquired == datetime(2180, 4, 1, 8, 53, 20) and first.modality == "radiograph" and first.age is None
    assert first.image == root / "files/p10/p10000032/s59999999/d2.jpg"
    assert " ".join(first.report.split()) == "No focal consolidation. No effusion. No acute process."


BEST = [
    [image_row("a", view="AP"), image_row("b", view="PA"), image_row("c", view="LATERAL")],
    *([image_row("b", clock=clock), image_row("a", clock="130000.0")] for clock in ("120000.0", "93000.0")),
    [image_row("a", rows="1000"), image_row("b", rows="3000")],
    [image_row("c"), image_row("b")],
]


@pytest.mark.parametrize("radiographs", BEST)
def test_radiograph_b_of_a_study_is_chosen_by_the_stated_rule(mimic, radiographs):
    laterals = [image_row("1", view="LATERAL"), image_row("0", view="LL")]
    for order in (radiographs, radiographs[::-1], radiographs + laterals):
        (patient,) = read(mimic(*order)).patients()
        assert [v.image.stem for v in patient.visits] == ["b"]
    assert patient.visits[0].lateral.name == "0.jpg"


def test_every_view_is_a_visit_where_that_is_asked_for_and_patients_of_few_visits_are_left_out(mimic):
    views = [image_row("a"), image_row("b", view="LATERAL"), image_row("c", study="5", day="21810101", view="LL")]
    root = mimic(*views, image_row("d", subject="10000048", study="6"))
    first, second = read(root, views="all").patients()
    assert [v.visit_id for v in first.visits] == ["s50414267-a", "s50414267-b", "s5-c"]
    assert len({v.report for v in first.visits}) == 1 and [v.image.stem for v in second.visits] == ["d"]
    reading = read(root, views="all", min_visits=2)
    assert reading.patients() == [first] and reading.rejected() == {"too-few-visits": 1}


def test_short_reports_are_left_out_by_the_words_of_the_chosen_sections(mimic):
    long = "Frontal view. " * 12  # 24 words, none of which is of the findings
    texts = {"4": f"FINDINGS: Clear - lungs.\nIMPRESSION: {long}", "5": "FINDINGS: No pleural effusion ."}
    root = mimic(image_row("a", study="4"), image_row("b", study="5"), reports=texts)
    reading = read(root, sections=["findings"], min_words=3, cleaning="r2gen-v1")
    assert [v.report for v in reading.patients()[0].visits] == ["no pleural effusion ."]
    assert reading.rejected() == {"too-few-words": 1}


def test_unusable_studies_are_counted(mimic):
    radiographs = [image_row(name, study=study) for name, study in zip("nres", "3457", strict=True)]
    radiographs += [image_row("ok"), image_row("d", study="6", day="")]
    radiographs += [image_row("l1", study="2", view="LATERAL"), image_row("l2", study="2", view="LL")]
    texts = {"4": None, "5": " \n", "7": "AP chest shows clear lungs."}
    reading = read(mimic(*radiographs, reports=texts, absent=["n"]))
    assert [v.visit_id for v in reading.patients()[0].visits] == ["s50414267"]
    reasons = ("empty-report", "no-date", "no-image", "no-report", "no-section", "not-frontal-radiograph")
    assert reading.rejected() == dict.fromkeys(reasons, 1)


def test_age_at_the_visit_and_sex_from_the_patients_table(mimic, tmp_path):
    others = image_row("d2", subject="10000048", study="1"), image_row("d3", subject="10000055", study="2")
    root = mimic(image_row("d1", day="21820101"), *others)
    text = b"subject_id,gender,anchor_age,anchor_year\n10000032,F,52,2180\n10000055,M,91,2100\n"
    (tmp_path / "patients.csv.gz").write_bytes(gzip.compress(text))
    reading = read(root, patients="../patients.csv.gz")
    one, unknown = reading.patients()
    assert (one.sex, one.visits[0].age) == ("F", 54) and (unknown.sex, unknown.visits[0].age) == (None, None)
    assert reading.rejected() == {"age-out-of-range": 1}  # 91 in 2100 is 171 in 2180


def test_official_splits(mimic):
    root = mimic(*(image_row(f"d{n}", subject=f"{n}0000000", study=f"{n}") for n in (1, 2, 3)))
    with pytest.raises(ConfigError, match="official splits"):
        read(root, split="train")
    rows = [("d1", "train"), ("d2", "validate"), ("d3", "test")]
    lines = ["dicom_id,study_id,subject_id,split", *(f"{name},1,1,{split}" for name, split in rows)]
    (root / "mimic-cxr-2.0.0-split.csv").write_text("\n".join(lines))
    assert [p.patient_id for p in read(root, split="train").patients()] == ["10000000"]
    assert len(read(root, split=["train", "test"]).patients()) == 2 and len(read(root).patients()) == 3
    official = read(root, split="official")
    assert len(official.patients()) == 3 and official.splits["10000000"] == "train"


def test_findings_of_a_table_are_labels_and_minus_one_is_unsure(mimic):
    path = mimic(image_row("a"), image_row("b", study="50414268", day="21800701"))
    text = "subject_id,study_id,Edema,No Finding,Pneumonia\n10000032,50414267,1.0,,-1.0\n10000032,50414268,,1.0,0.0\n"
    with gzip.open(path / "chexpert.csv.gz", "wt") as file:
        file.write(text)
    options = {"reports": "../mimic-cxr", "labels": "chexpert.csv.gz"}
    (patient,) = read_mimic_cxr(path, options).patients()
    pairs = [(v.labels, v.uncertain) for v in patient.visits]
    assert pairs == [({"Edema"}, {"Pneumonia"}), ({"No Finding"}, frozenset())]


def volume(name, day="20200131", age="054Y", sex="F", slices="300", findings="Lungs are clear.", impression="Normal."):
    report = dict(zip(REPORTS, (name, "Cough.", "Non-contrast.", findings, impression), strict=True))
    return report | dict(zip(METADATA, (name, age, sex, day, slices), strict=True))


REPORTS = ("VolumeName", "ClinicalInformation_EN", "Technique_EN", "Findings_EN", "Impressions_EN")
METADATA = ("VolumeName", "PatientAge", "PatientSex", "StudyDate", "NumberofSlices")


@pytest.fixture
def ct_rate(tmp_path):
    def write(*volumes, absent=(), part="train", images=None, no_report=(), no_metadata=(), no_chest=()):
        table, tables = "train" if part == "train" else "validation", {}
        for file, columns, without in (
            (f"radiology_text_reports/{table}_reports.csv", REPORTS, no_report),
            (f"metadata/{table}_metadata.csv", METADATA, no_metadata),
        ):
            tables[file] = [{name: v[name] for name in columns} for v in volumes if v["VolumeName"] not in without]
        names = [v["VolumeName"] for v in volumes if v["VolumeName"].endswith(".nii.gz")]
        places = {name: [name.rsplit("_", parts)[0] for parts in (2, 1)] for name in names}
        files = ["/".join([images or f"{part}_fixed", *places[name], name]) for name in names if name not in absent]
        root = lay(tmp_path / "dataset", tables, files)
        (root / f"metadata/no_chest_{part}.txt").write_text("".join(f"{part}/x/x_a/{name}\n" for name in no_chest))
        return root.parent

    return write


def test_scans_are_visits_in_the_order_of_their_dates_not_of_their_letters(ct_rate, tmp_path):
    path = ct_rate(
        volume("train_1_a_1.nii.gz", day="20210101"), volume("train_1_b_1.nii.gz", day="20200101", age="053Y"),
        volume("train_2_a_1.nii.gz", sex="M", age=""),
    )  # fmt: skip
    for place in (path, path / "dataset"):
        one, two = read_ct_rate(place).patients()
        assert [v.visit_id for v in one.visits] == ["train_1_b", "train_1_a"]
        assert [v.age for v in one.visits] == [53, 54] and one.sex == "F" and one.patient_id == "train_1"
        assert one.visits[0].acquired == datetime(2020, 1, 1) and one.visits[0].modality == "ct"
        assert one.visits[0].image == tmp_path / "dataset/train_fixed/train_1/train_1_b/train_1_b_1.nii.gz"
        assert one.visits[0].report == "Lungs are clear.\nNormal." and (two.sex, two.visits[0].age) == ("M", None)


FIRST = {"train_1_a_1.nii.gz"}


@pytest.mark.parametrize(
    "slices, lacks, chosen",
    [("300 300", {}, 1), ("300 400", {}, 2), ("x x", {}, 1), ("400 300", {"absent": FIRST}, 2),
     ("300 300", {"no_report": FIRST}, 1), ("300 300", {"no_metadata": FIRST, "absent": {"train_1_a_2.nii.gz"}}, 1)],
)  # fmt: skip
def test_one_reconstruction_of_a_scan_by_the_stated_rule(ct_rate, slices, lacks, chosen):
    """What the chosen one lacks in the tables, another one gives."""
    volumes = [volume(f"train_1_a_{i}.nii.gz", slices=s) for i, s in enumerate(slices.split(), start=1)]
    (patient,) = read_ct_rate(ct_rate(*volumes[::-1], **lacks)).patients()
    assert [v.image.name for v in patient.visits] == [f"train_1_a_{chosen}.nii.gz"]
    assert patient.visits[0].report and patient.visits[0].age == 54


def test_unusable_scans_are_counted(ct_rate):
    path = ct_rate(
        *(volume(f"train_{n}_a_1.nii.gz") for n in (1, 2, 3, 6, 8)), volume("train_1_b_1.nii.gz", day=""),
        volume("train_4_a_1.nii.gz", findings="", impression=""), volume("train_5_a_1.nii.gz", age="430Y"),
        volume("scan 7"), absent=["train_2_a_1.nii.gz"], no_report=["train_3_a_1.nii.gz"],
        no_metadata=["train_6_a_1.nii.gz"], no_chest=["train_8_a_1.nii.gz", "train_9_a_1.nii.gz"],
    )  # fmt: skip
    reading = read_ct_rate(path)
    assert [p.patient_id for p in reading.patients()] == ["train_1"]
    once = ("age-out-of-range", "bad-name", "no-chest", "no-image", "no-report", "no-section")
    assert reading.rejected() == {"no-date": 2, **dict.fromkeys(once, 1)}


def test_volumes_without_hounsfield_units_are_refused(ct_rate):
    path = ct_rate(volume("train_1_a_1.nii.gz"), images="train")
    with pytest.raises(ConfigError, match="train_fixed"):
        read_ct_rate(path)
    (patient,) = read_ct_rate(path, {"images": "dataset/train"}).patients()
    assert "train" in patient.visits[0].image.parts, "whoever names a folder knows what it contains"


def test_parts_and_sections(ct_rate):
    path = ct_rate(volume("valid_1_a_1.nii.gz", day="20200131.0"), part="valid")
    (patient,) = read_ct_rate(path, {"part": "valid", "sections": ["technique", "impression"]}).patients()
    assert patient.visits[0].report == "Non-contrast.\nNormal." and "valid_fixed" in patient.visits[0].image.parts
    everything = read_ct_rate(path, {"part": "valid", "sections": "all"}).patients()[0].visits[0].report
    assert everything.splitlines()[0] == "HISTORY: Cough." and everything.splitlines()[-1] == "IMPRESSION: Normal."


def test_abnormalities_of_a_table_are_labels_and_any_reconstruction_has_them(ct_rate):
    path = ct_rate(volume("train_1_a_1.nii.gz"), volume("train_1_a_2.nii.gz"), volume("train_2_a_1.nii.gz"))
    (path / "labels.csv").write_text("VolumeName,Emphysema,Lung nodule\ntrain_1_a_2.nii.gz,1,0\n")
    patients = read_ct_rate(path, {"labels": "labels.csv"}).patients()
    assert {p.patient_id: p.visits[0].labels for p in patients} == {"train_1": {"Emphysema"}, "train_2": None}
    assert all(p.visits[0].labels is None for p in read_ct_rate(path).patients())
