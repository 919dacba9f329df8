"""Who am I, and how do ranks talk to each other.

The only package that imports torch.distributed or reads rank variables from the environment.
"""
