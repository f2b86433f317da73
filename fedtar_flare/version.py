"""The package version, read by the build and sent in the handshake."""

__version__ = "0.1.0"
