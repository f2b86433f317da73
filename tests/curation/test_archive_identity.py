"""No study of an archive gets another's report, in whatever order files and rows come; rejected images are none."""

import random
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_dicom import chest, of, put, then, write_series
from make_documents import file, indexed
from tables import cases, write_table

from fedtar_flare.curation.archive import index_folder
from fedtar_flare.curation.archive_reports import join_reports
from fedtar_flare.curation.documents import NOBODY, Identifier, may_be_same
from fedtar_flare.imaging.readers.ct import read_ct

ISSUERS = st.sampled_from(["NORTH", "NORTH|1.2.1", "SOUTH|1.2.2"])


@st.composite
def archives(draw):
    """Files of a few studies, and rows about them: each row's text names its study, and the order that it is about."""
    files, rows = [], []

    def maybe(value):
        return value if draw(st.booleans()) else ""

    for n in range(draw(st.integers(1, 4))):
        uid, day = f"1.2.{n}", draw(st.sampled_from(["20200131", "20200201"]))
        patient = Identifier(draw(st.sampled_from("PQ")), draw(ISSUERS))
        orders = [Identifier(number, draw(ISSUERS)) for number in draw(st.sampled_from(["1", "2", "12"]))]
        for i in range(3):
            order = orders[i % len(orders)]
            stated = patient._replace(issuer=maybe(patient.issuer)), order._replace(issuer=maybe(order.issuer))
            other = frozenset({Identifier(draw(st.sampled_from("PQ")), maybe("WEST"))} if draw(st.booleans()) else ())
            files.append(file(uid, i, *stated, day, others=other))
        for order in orders:
            key = draw(st.sampled_from(["uid", "number", "day"]))
            number = order if key == "number" or draw(st.booleans()) else NOBODY
            about = f"{uid} {number.value}" if number.value and len(orders) > 1 else uid
            rows.append({"study_instance_uid": uid if key == "uid" else "", "accession_number": number.value,
                         "issuer": number.value and maybe(number.issuer), "study_date": day, "report": about,
                         "patient_id": patient.value if key == "day" else maybe(patient.value)})  # fmt: skip
            rows[-1]["patient_issuer"] = rows[-1]["patient_id"] and maybe(patient.issuer)
    return files, rows


@settings(max_examples=200, deadline=None)
@given(archives(), st.integers(0, 1 << 32))
def test_no_study_gets_another_report_and_no_order_of_files_or_rows_changes_one(tmp_path_factory, archive, seed):
    files, rows = archive
    table = tmp_path_factory.mktemp("reports") / "r.csv"
    index = indexed(files, write_table(table, rows))
    assert all(study.report in ("", study.uid) for study in index.studies)
    for one, other in combinations(index.studies, 2):
        if not may_be_same(one.patients[0], other.patients[0]):
            assert one.patient_id != other.patient_id
    shuffle = random.Random(seed).shuffle
    shuffle(files)
    shuffle(rows)
    again = indexed(files, write_table(table, rows))
    assert again.studies == index.studies and again.rejected() == index.rejected()


def study(folder, **tags):
    """A series of two slices; of patient P and accession number 1, unless tags say otherwise."""
    uids = {"StudyInstanceUID": f"1.2.{folder.name}", "SeriesInstanceUID": f"1.3.{folder.name}"}
    edit = put(**{"PatientID": "P", "AccessionNumber": "1", "StudyDate": "20200131"} | uids | tags)
    write_series(folder, chest(2), edit=then(edit, lambda ds, i: put(SOPInstanceUID=f"1.3.{folder.name}.{i}")(ds)))


EXAMPLES = cases(__file__, "archive_identity.yaml")


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("order", [1, -1])
def test_what_is_not_certain_is_left_out_under_a_reason(tmp_path, name, order):
    studies, rows, expected = EXAMPLES[name]
    for n, tags in enumerate(studies):
        tags = {name: [of(**one) for one in v] if isinstance(v, list) else v for name, v in tags.items()}
        study(tmp_path / "d" / f"{n if order > 0 else 9 - n}", **tags)
    keys = ("study_instance_uid", "accession_number", "patient_id", "patient_issuer", "study_date", "report")
    told = [{"report": f"Row {n}.", **row} for n, row in enumerate(rows)][::order]
    join_reports(index := index_folder(tmp_path / "d"), write_table(tmp_path / "r.csv", told, keys))
    outcome = [s.report or "no-report" for s in index.studies] + [problem.reason for problem in index.problems]
    assert sorted(outcome) == sorted(expected)


def key_object(path, title, *sops):
    series = of(ReferencedSOPSequence=[of(ReferencedSOPInstanceUID=sop) for sop in sops])
    study = of(StudyInstanceUID="1.2.8", ReferencedSeriesSequence=[series])
    ds = of(SOPClassUID="1.2.840.10008.5.1.4.1.1.88.59", SOPInstanceUID="1.9.1", Modality="KO", PatientID="P",
            StudyInstanceUID="1.2.8", SeriesInstanceUID="1.9", ConceptNameCodeSequence=[of(CodeValue=title)],
            CurrentRequestedProcedureEvidenceSequence=[study])  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    ds.save_as(path, implicit_vr=False, little_endian=True)


REJECTING = ("113001", "113037", "113038", "113039")


@pytest.mark.parametrize("title", [*REJECTING, "113000"])
def test_instances_that_a_key_object_rejects_are_left_out_and_counted(tmp_path, title):
    """A series that was repeated, and a study as a whole; 113000 (of interest) rejects nothing."""
    folder, rejects = tmp_path / "d", title in REJECTING
    for series, shift in (("1", 0), ("2", 500)):
        edit = put(StudyInstanceUID="1.2.1", PatientID="Q", StudyDate="20200131", SeriesInstanceUID=series)
        named = then(edit, lambda ds, i, series=series: put(SOPInstanceUID=f"{series}.{i}")(ds))
        write_series(folder / "a", chest(9) + np.int16(shift), edit=named, prefix=series)
    study(folder / "8", AccessionNumber="2")
    key_object(folder / "kept" / "1.dcm", title, *(f"1.{i}" for i in range(9)), "1.3.8.0", "1.3.8.1")
    index = index_folder(folder)
    assert index.rejected() == ({"rejected-instance": 2} if rejects else {})
    index = index_folder(folder, links=tmp_path / "links")
    assert index.rejected() == ({"rejected-instance": 1} if rejects else {})
    assert index.notes["rejected-instance"] == 9 * rejects
    (image,) = [study.image for study in index.studies if study.uid == "1.2.1"]
    assert len(list(image.rglob("*.dcm"))) == (9 if rejects else 18)
    if rejects:
        assert np.array_equal(read_ct(image).hu, chest(9) + np.int16(500))
