"""Readers of CT volumes (DICOM, NIfTI) in Hounsfield units, of radiographs and of photographs."""
