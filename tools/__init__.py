"""Scripts that make the shipped weights again, run from the repository's folder; no part of the package."""
