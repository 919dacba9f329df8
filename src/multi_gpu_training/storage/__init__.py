"""Runs in object storage: a URL as `save_dir`, uploads beside training, resuming from anywhere."""
