"""The package version, read by the build and sent in the handshake."""

__all__ = ["__version__"]
__version__ = "0.1.0"
