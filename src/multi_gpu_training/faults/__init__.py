"""Faults of a run: what is done about each, and how to cause one on purpose."""
