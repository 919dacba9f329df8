"""`mgt estimate`: know before you rent.

measuring   runs the training for some steps on one GPU or CPU rank: a StepProfile
meter       the part of it inside the rank; anatomy, cutting, loading, power are its tools
memory      peak memory of a batch that was not measured, and the largest that fits
length      how long the training is
outcome     what was forecast as rows: table, JSON, forecast.json; wording has the words
picture     the same as a picture
speedup     guide 002's functions
"""
