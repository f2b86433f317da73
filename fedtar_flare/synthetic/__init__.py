"""A synthetic longitudinal chest-CT cohort: schematic phantoms, courses of disease, and reports in several styles.

It teaches how the method behaves, and tests it; it says nothing about medicine. Patients, reports and images are
drawn from seeds, and the truth is written with them, so every effect in the data is known.
"""
