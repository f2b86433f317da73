"""A synthetic longitudinal chest-CT cohort drawn from seeds, with its truth; it says nothing about medicine."""
