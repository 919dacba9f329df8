"""Checkpoints: what they hold, how they are written, verified, kept and resumed from."""
