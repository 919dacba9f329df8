"""Measure a training from inside and from outside: for check, bench, estimate, verify, balance.

request         what to measure; how it reaches a user's script, and what the manager asks of it
case            one training to measure, and its result
script_runner   starts a script or recipe in child processes and turns every end into a result
case_launcher   launches the ranks of one case
meter           kind: the time of each step (bench)
footprint       kind: step times, and the memory of a step tensor by tensor (check)
profiler        kind: step times, then one step taken apart (estimate)
recorder        kind: samples, losses, gradients, weights and buffers of every step (verify)
memory_model    what a batch needs, and whether it fits; one safety margin for everybody
balance         shares of a batch by each rank's speed and memory

step_anatomy, loader_rates and power are tools of the profiler; tensor_sketch, batch_rows,
comparable_math and split_probe are tools of the recorder; trainer_access holds everything
that a measurement does to a trainer.

A kind is a module of this package that names its class in `MEASUREMENT`: a new one is one file.
Nothing here imports the manager, which is how the manager can import this.
"""
