"""Traces of chosen steps by torch.profiler, and what they say.

`step_tracer` records them while a run trains, `trace_summary` reads a trace, `trace_view` shows
what it found in the terminal and in the report.
"""
