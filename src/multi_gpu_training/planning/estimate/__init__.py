"""`mgt estimate`: know before you rent.

profiling         runs the training for some steps on one GPU or CPU rank: a StepProfile
training_length   how long the training is
outcome           what was forecast as rows: a table, JSON, in words, and files with a picture
speedup           guide 002's functions
"""
