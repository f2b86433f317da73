"""FedTAR: what the paper adds, one file per idea."""
