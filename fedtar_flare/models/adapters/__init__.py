"""Low-rank adapters and their files."""
