"""Readers of CT volumes (DICOM, NIfTI) in Hounsfield units and of chest films; plain functions and MONAI readers."""
