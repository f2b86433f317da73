"""Readers of CT volumes (DICOM, NIfTI) in Hounsfield units and of chest radiographs, plain and for MONAI."""
