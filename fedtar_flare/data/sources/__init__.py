"""Sources: the layouts in which studies lie on disk, read into patients. A study that cannot be used is left out."""
