"""FedMRG: an adapter that travels and one that stays, which teach each other, and diagnoses as prompts (Che et al.)."""
