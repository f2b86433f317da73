"""What belongs to a hospital: site file, key, state, participation, audit, guard, privacy."""
