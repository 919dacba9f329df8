"""Is this machine ready to train: software, GPUs, links, memory, disk, network, a real step.

registry          how a check is added, and what it may look at
software          versions that must fit each other, and what CUDA_VISIBLE_DEVICES lets through
devices           each GPU: memory, clocks, other processes
machine           shared memory, files, cores, memory, threads, limits of a container
disk              where checkpoints go
network_check     names, addresses, ports, network cards
links             what a link should give, and what copies between GPUs gave
rank_trial        real ranks: sums, speed, a training step, or why they did not end together
training_fit      whether a recipe or script fits: memory, largest batch, time
recommendation    the tables, and a command that is ready
checkup           all of it in order, on one machine or many
check_report      what a line says, the report they make, and how a terminal shows it
topology          who takes part, and where the ranks meet
watched_process   programs in child processes, with a time limit
nvml              NVIDIA's library, asked defensively, and what it tells of a GPU
"""
