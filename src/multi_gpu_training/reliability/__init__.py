"""Keep: the checkpoint store and what goes into it."""
