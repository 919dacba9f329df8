"""Place: who am I, start the ranks, talk to each other.

The only folder that imports torch.distributed or reads rank variables from the environment.
"""
