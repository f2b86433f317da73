"""Rival methods, each with FedTAR's number of exchanges and local updates, and without time or patient."""
