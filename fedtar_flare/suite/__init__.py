"""Experiments: methods over seeds and data, run in one process each, and their comparison."""
