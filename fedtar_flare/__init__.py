"""Federated learning of medical report generation that knows time and the patient, on NVIDIA FLARE."""

from fedtar_flare.version import __version__

__all__ = ["__version__"]
