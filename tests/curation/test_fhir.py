"""Reports of FHIR: whose, of which study, in force and of what text, else left out by reason."""

import pytest
from make_documents import TEXT, acsn, bundle, deletion, form, lines, patient, report
from tables import cases

pytest.importorskip("hl7", reason="of the extra 'pacs'")
MARCH = "2024-03-01T00:00:00Z"
STUDY = {"resourceType": "ImagingStudy", "id": "7", "subject": {"reference": "Patient/1"}, "identifier": [
    {"system": "urn:dicom:uid", "value": "urn:oid:1.2.7"}]}  # fmt: skip
ORDER = {"resourceType": "ServiceRequest", "id": "8", "identifier": [acsn("A8")]}
NINTH = ORDER | {"id": "9", "identifier": [acsn("A9")]}
SIXTH = STUDY | {"id": "6", "identifier": [{"system": "urn:dicom:uid", "value": "urn:oid:1.2.6"}]}
OF_A7, OF_A6 = ({"identifier": [*s["identifier"], acsn(n, "")]} for s, n in ((STUDY, "A7"), (SIXTH, "A6")))
BOTH = [{"reference": "ImagingStudy/7"}, {"reference": "ImagingStudy/6"}]
CT, XRAY = ({"coding": [{"system": "urn:codes", "code": code}]} for code in ("ct", "xray"))
OWN = {"system": "urn:reports", "value": "77"}
NOTHING = {"resourceType": "Observation", "id": "1"}


@pytest.fixture
def read(collected):
    """Rows as (patient, number, study, text), and reasons with their counts."""

    def read(files):
        rows, reasons = collected(files)
        return sorted((owner, number, study, text) for owner, _, number, _, study, text in rows), reasons

    return read


def a(text=TEXT, number="A1", owner="P1", study=""):
    return owner, number, study, text


def export(*resources):
    """Files of patient P1 and of others."""
    return {"a.ndjson": lines(patient(), *resources)}


ROOT, OTHER = "http://one/fhir", "https://two/fhir"
FULL = {"reference": f"{ROOT}/Patient/1"}
URN = {"reference": "urn:uuid:5"}
ORDERED, AGAIN = ([{"reference": f"ServiceRequest/{n}"}] for n in (8, 9))
TWO_FOLDERS = {f"{folder}/{kind}.ndjson": lines(item) for folder, owner in (("x", "P1"), ("y", "P2"))
               for kind, item in (("p", patient(owner)), ("r", report(f"A-{owner}", text=owner)))}  # fmt: skip
TWO_SERVERS = [
    {"fullUrl": f"{root}/{item['resourceType']}/{item['id']}", "resource": item}
    for root, owner in ((ROOT, "P1"), (OTHER, "P2"))
    for item in (patient(owner), report(id="1", identifier=[acsn(f"A-{owner}")]))
]
HISTORY = [report(text="new", meta={"versionId": "10"}), report(text="old", meta={"versionId": "9"})]
GONE = {"method": "DELETE", "url": "DiagnosticReport/A1"}
WHOSE = {
    "two Bundles have one id": (
        {"a.json": bundle(patient(), report()), "b.json": bundle(patient("P2"), report("A2"))},
        [a(), a(number="A2", owner="P2")], {}),
    "two exports have one id": (TWO_FOLDERS, [a(o, f"A-{o}", o) for o in ("P1", "P2")], {}),
    "two servers in one Bundle": (
        {"a.json": bundle(*TWO_SERVERS)}, [a(number="A-P1"), a(number="A-P2", owner="P2")], {}),
    "by an absolute URL, wherever it stands": (
        {"a.json": bundle(patient(), root=ROOT), "b.json": bundle(patient("P2"), report(subject=FULL)),
         "c/d.ndjson": lines(report("A2", subject={"reference": f"{ROOT}/Patient/1/_history/3"}))},
        [a(), a(number="A2")], {}),
    "a URL of another resource": (
        {"a.json": bundle({"fullUrl": f"{ROOT}/Patient/1", "resource": patient("P2", "2")}, report(subject=FULL))},
        [], {"bad-full-url": 1, "no-patient-id": 1}),
    "by a URN, within its Bundle alone": (
        {"a.json": bundle({"fullUrl": "urn:uuid:5", "resource": patient()}, report(subject=URN)),
         "b.json": bundle(report("A2", subject=URN))},
        [a()], {"no-patient-id": 1}),
    "of another Bundle": ({"a.json": bundle(patient()), "b.json": bundle(report())}, [], {"no-patient-id": 1}),
    "contained": (export(report(subject={"reference": "#p"}, contained=[patient("P3", "p")])), [a(owner="P3")], {}),
    "stated without a resource": (export(report(subject={"identifier": {"value": "P4"}})), [a(owner="P4")], {}),
    "one id, two persons": (export(report()) | {"b.ndjson": lines(patient("P2"))}, [], {"several-patients": 1}),
    "no person": (
        export(report(subject={"reference": "Group/1", "identifier": {"value": "P1"}})), [], {"no-patient-id": 1}),
    "the order is another's": (
        export(patient("P2", "2"), ORDER | {"subject": {"reference": "Patient/2"}},
               report(basedOn=ORDERED, identifier=None)), [], {"several-patients": 1}),
    "by the study and the order": (
        export(STUDY, ORDER, report("x", "1", identifier=None, imagingStudy=BOTH[:1]),
               report("y", "2", identifier=None, basedOn=ORDERED)), [a("1", "", study="1.2.7"), a("2", "A8")], {}),
    "the UID of an SR is no study's": (
        export(report(identifier=[acsn("A1"), {"system": "urn:dicom:uid", "value": "1.9"}])), [a()], {}),
    "several orders": (export(ORDER, report(basedOn=ORDERED)), [], {"several-studies": 1}),
    "two orders that it is based on": (
        export(ORDER, NINTH, report(identifier=None, basedOn=ORDERED + AGAIN)), [a(number="A8"), a(number="A9")], {}),
    "two studies with their orders": (
        export(STUDY | OF_A7, SIXTH | OF_A6, report(identifier=None, imagingStudy=BOTH)),
        [a(number="A6", study="1.2.6"), a(number="A7", study="1.2.7")], {}),
    "two studies, one of another person": (
        export(patient("P2", "2"), STUDY | OF_A7, SIXTH | OF_A6 | {"subject": {"reference": "Patient/2"}},
               report(identifier=None, imagingStudy=BOTH)), [], {"several-patients": 1}),
    "an identifier of no type, given twice": (
        {"a.json": bundle(patient() | {"identifier": [{"type": {"text": "BSN"}, "system": "urn:x", "value": "9"}] * 2},
                          report(category=[{"coding": [{"code": "394914008"}, {"code": "RAD"}]}]))},
        [a(owner="9")], {}),
    "neither a number nor a study": (
        export(report(identifier=None, imagingStudy=[{"display": "CT"}])), [], {"no-accession-number": 1}),
    "two procedures under one number": (
        export(report(text="1", code=CT, identifier=[acsn("A1"), OWN]),
               report(text="2", id="2", code=XRAY, identifier=[acsn("A1"), OWN])), [], {"several-reports": 2}),
}  # fmt: skip
FORCE = {
    "older versions": (export(*HISTORY), [a("new")], {"superseded": 1}),
    "which is newer is unclear": (export(report(issued=None), report(text="other")), [], {"two-at-once": 2}),
    "of no date": (export(report(issued=None, effectivePeriod={"start": "2024-01"})), [a()], {}),
    "of a date that is none": (export(report(issued="yesterday")), [], {"bad-document": 1}),
    "in error, without identifier": (
        export(report(), {"resourceType": "DiagnosticReport", "id": "A1", "issued": MARCH,
                          "status": "entered-in-error"}), [], {"superseded": 1, "withdrawn": 1}),
    "history": ({"a.json": bundle(patient(), *HISTORY, {"fullUrl": f"{ROOT}/DiagnosticReport/A1", "request": GONE},
                                  root=ROOT, type="history")}, [], {"withdrawn": 2, "superseded": 1}),
    "deleted of an export": (
        {"x/a.ndjson": lines(patient(), report(), report("A2")), "y/a.ndjson": lines(patient("P2"), report()),
         "x/deleted/d.ndjson": bundle(deletion("A1"), type="transaction")},
        [a(number="A2"), a(owner="P2")], {"withdrawn": 2}),
    "a patient deleted": (
        {"a.json": bundle(patient(), report(), {"request": {"method": "DELETE", "url": "Patient/1"}})},
        [], {"deleted-resource": 1}),
    "amended under a new id": (
        export(report(code=CT, identifier=[acsn("A1"), OWN]), report(
            id="2", code=CT, identifier=[acsn("A1"), OWN], status="amended", issued=MARCH, text="new")),
        [a("new")], {"superseded": 1}),
    "in error under a new id": (
        export(report(code=CT), report(code=CT, id="2", status="entered-in-error", issued=MARCH),
               report("A2", code=CT), report("A2", code=XRAY, id="3", status="cancelled", issued=MARCH)),
        [a(number="A2")], {"withdrawn": 2, "withdrawn-elsewhere": 1}),
    "a deletion by search, another document": (
        {"a.json": bundle(patient(), report(), {"resourceType": "DocumentReference", "id": "d"},
                          {"request": {"method": "DELETE", "url": "DiagnosticReport?identifier=A1"}})},
        [a()], {"other-document": 1, "unclear-deletion": 1}),
    "preliminary": (export(report(status="preliminary")), [], {"status-preliminary": 1}),
    "a page is missing": (
        {"a.json": bundle(patient(), report(), link=[{"relation": "next", "url": "http://x?2"}])},
        [a()], {"missing-page": 1}),
    "all pages": (
        {"a.json": bundle(patient(), root=ROOT, link=[{"relation": "next", "url": "http://x?2"}]),
         "b.json": bundle(report(), root=ROOT, link=[{"relation": "self", "url": "http://x?2"}])}, [a()], {}),
    "a Bundle within a Bundle": (
        {"a.json": bundle(patient(), report(), {"resourceType": "Bundle", "id": "b"})}, [a()], {"bundle-in-bundle": 1}),
    "a line cut short": (
        {"a.ndjson": lines(patient(), report()) + '\n{"resourceType": "Diag'}, [a()], {"unreadable": 1}),
    "subsetted": (export(report(meta={"tag": [{"code": "SUBSETTED"}]})), [], {"subsetted": 1}),
    "another section": (export(report(category=[{"coding": [{"code": "LAB"}]}])), [], {"other-section": 1}),
    "files with nothing for a report": (
        export(report()) | {"b.ndjson": lines(NOTHING), "c.json": bundle(NOTHING), "d.json": "", "e.json": "[1]",
                            "f.json": '{"a": 1}'}, [a()], {"no-report": 5}),
    "text in observations, which is not the conclusion": (
        export(report(presentedForm=None, result=[{"reference": "Observation/1"}])), [], {"text-in-observations": 1}),
}  # fmt: skip


@pytest.mark.parametrize("case", [*WHOSE, *FORCE])
def test_a_report_goes_to_its_own_study_while_it_is_in_force(read, case):
    files, rows, left_out = (WHOSE | FORCE)[case]
    assert read(files) == (sorted(rows), left_out)


TEXTS = cases(__file__, "fhir.yaml")


def formed(text=None, kind="text/plain; charset=UTF-8", encoding="utf-8", **more):
    """A form of this text in a character set, or one of other fields alone."""
    return more if text is None else form(text.encode(encoding), kind, **more)


@pytest.mark.parametrize("case", TEXTS)
def test_the_text_is_whole_and_certain(read, case):
    forms, *expected = TEXTS[case]
    forms = forms and [formed(**one) for one in forms]
    own = report(presentedForm=forms, conclusion="short", language="de" if case == "its own language" else None)
    rows, left_out = read(export(own))
    assert [row[3].strip() for row in rows] + [*left_out] == expected
