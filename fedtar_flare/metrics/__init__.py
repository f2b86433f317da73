"""Language and clinical scores of generated reports. Pure Python and numpy, so they also run in a notebook."""
