"""`mgt bench`: what a training costs on this machine, measured case by case.

case        what is measured, and what came out
runner      one case in a process of its own
modes       single, DP and DDP side by side
batches     samples per GPU
precision   float32, mixed precision, mixed precision with accumulation
tuning      the settings of DDP
report      tables, JSON and pictures
comparison  the same for results of runs: `comparison_report`
"""
