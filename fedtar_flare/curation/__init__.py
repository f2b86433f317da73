"""Index, check and divide an archive."""
