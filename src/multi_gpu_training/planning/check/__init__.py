"""Is this machine ready to train: software, GPUs, links, memory, disk, network, a real step.

findings   what a line says, and the report they make
software   versions that must fit each other
visible    what CUDA_VISIBLE_DEVICES lets through
nvml       NVIDIA's library, asked defensively
devices    each GPU: memory, clocks, other processes
links      what a link should give, and what copies and exchanges gave
copies     the program that copies between GPUs
machine    shared memory, files, cores, memory, threads
disk       where checkpoints go
network    names, addresses, ports
team       real ranks in processes of their own, with a time limit
exchange   what these ranks found, and the curve they measured
fit_runner trains one case of a recipe or script
fitting    all cases: memory, largest batch, time
fit        what that gave, and what it means
advice     the tables, and a command that is ready
checkup    all of it in order
"""
