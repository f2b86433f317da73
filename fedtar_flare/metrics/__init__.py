"""Scores of generated reports: language and clinical. Pure Python and numpy: they run in a notebook."""
