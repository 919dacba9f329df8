"""Runs while they run: what `mgt dashboard` shows in a browser and `mgt top` in a terminal."""
