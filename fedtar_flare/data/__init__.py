"""Patients and visits of one site, how their images and reports are read, and how they become model input."""
