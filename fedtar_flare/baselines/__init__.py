"""Rival methods, each with FedTAR's number of exchanges and local updates, without its aggregation over time."""
