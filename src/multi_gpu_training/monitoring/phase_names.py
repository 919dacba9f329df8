"""The phases of a training step: where its time goes on a rank.

input        waiting for a batch
forward      the loss function
backward     gradients, as far as this rank computes them itself
comm         waiting for other ranks and for the network, while nothing is computed
optimizer    clipping and moving the weights
checkpoint   standing still while the state is copied
other        hooks, the log, Python between the phases
"""

PHASES = ("input", "forward", "backward", "comm", "optimizer", "checkpoint", "other")
