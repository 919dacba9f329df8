"""Before a run: what is there."""
