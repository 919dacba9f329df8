"""From one measured step to N GPUs: time, memory, cost. Arithmetic only, without torch."""
