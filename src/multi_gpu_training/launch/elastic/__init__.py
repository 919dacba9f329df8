"""Runs on several machines without a cluster manager: one launcher per machine, any may be lost."""
