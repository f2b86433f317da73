"""Patients and visits of one site, and how their images and reports are read."""
