"""Structured Reports, written with pydicom alone."""

from io import BytesIO

from make_dicom import put
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, generate_uid


def of(**values):
    put(**values)(ds := Dataset())
    return ds


def code(meaning, value="1", scheme="L"):
    return [of(CodeValue=value, CodingSchemeDesignator=scheme, CodeMeaning=meaning)]


def item(kind, name="", value="", *items, relation="CONTAINS", number="1", scheme="L"):
    ds = of(ValueType=kind, RelationshipType=relation, ContentSequence=list(items))
    if name:
        ds.ConceptNameCodeSequence = code(name, number, scheme)
    keyword = {"TEXT": "TextValue", "PNAME": "PersonName", "DATE": "Date", "UIDREF": "UID"}.get(kind)
    if keyword:
        setattr(ds, keyword, value)
    elif kind == "CODE":
        ds.ConceptCodeSequence = code(*([value] if isinstance(value, str) else value))
    elif kind == "NUM":
        unit = code("millimeter", "mm", "UCUM")
        ds.MeasuredValueSequence = [of(NumericValue=value, MeasurementUnitsCodeSequence=unit)] if value else []
    return ds


def sr(*items, title=("Befund", "18748-4", "LN"), flags="COMPLETE VERIFIED FINAL", **changes):
    ds = of(ValueType="CONTAINER", ContentSequence=list(items or [item("TEXT", "Lung", "Klar.")]))
    ds.ConceptNameCodeSequence, ds.file_meta = code(*title), FileMetaDataset()
    ds.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    ds.CompletionFlag, ds.VerificationFlag, ds.PreliminaryFlag = flags.split()
    values = {"SOPClassUID": "1.2.840.10008.5.1.4.1.1.88.11", "SOPInstanceUID": generate_uid(), "Modality": "SR",
              "SpecificCharacterSet": "ISO_IR 192", "PatientID": "P1", "AccessionNumber": "A1",
              "StudyInstanceUID": "1.2.1", "ContentDate": "20240131", "ContentTime": "1200"} | changes  # fmt: skip
    put(**values)(ds)
    ds.file_meta.MediaStorageSOPClassUID, ds.file_meta.MediaStorageSOPInstanceUID = ds.SOPClassUID, ds.SOPInstanceUID
    ds.save_as(held := BytesIO(), enforce_file_format=True)
    return held.getvalue()
