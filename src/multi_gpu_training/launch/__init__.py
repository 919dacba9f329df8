"""Start ranks somewhere, watch them, stop them, and tell how they ended.

`engine.py` has the protocol that all ways of starting ranks follow, and the list of them.
"""
