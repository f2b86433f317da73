"""FedTAR: the parts that the paper adds, one file per idea."""
