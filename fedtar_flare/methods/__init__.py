"""FedAvg and the rivals that differ from it in a few lines, one file each; each ends with its METHOD."""
