"""Federated evaluation, which FLARE calls cross-site evaluation: candidates are scored, and nothing is trained."""
