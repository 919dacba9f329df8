"""Train on a Slurm cluster, over time limits, preemption and lost nodes, with an ordinary script.

    mgt check --engine slurm --nodes 2 --gpus-per-node 4       # is the cluster ready?
    mgt run --engine slurm --nodes 2 --gpus-per-node 4 --time 4:00:00 examples/slurm.py
    mgt run --engine slurm --nodes 2 --num-gpus 2 examples/slurm.py         # CPU ranks
    mgt run --engine slurm --nodes 2 --gpus-per-node 4 --dry-run examples/slurm.py
    mgt jobs                                                   # what was submitted from here
    mgt cancel 17                                              # saves first

Run these on a login node, in a folder that all nodes see. Two minutes before the time limit the
ranks save; Slurm requeues the job and it continues. Try it without a cluster first:

    python examples/slurm.py --epochs 2                        # all GPUs, or the CPU
    mgt run --num-gpus 2 examples/slurm.py --epochs 2
"""

import argparse
import socket

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager


def main() -> None:
    parser = argparse.ArgumentParser(description="A training that survives its jobs.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="over all GPUs of all nodes")
    parser.add_argument("--run-name", help="default: the time; a requeued job keeps its own")
    parser.add_argument("--save-dir", default="runs", help="on a disk of all nodes, or s3://...")
    parser.add_argument("--resume", action="store_true", help="continue that run in a new job")
    args = parser.parse_args()

    manager = MultiGPUTrainingManager(
        MultiGPUConfig(
            # Over all GPUs: with one node or with eight, a step sees the same samples.
            global_batch_size=args.batch_size,
            epochs=args.epochs,
            checkpoint_frequency=200,  # what a lost node costs at most; epochs end with one, too
            save_dir=args.save_dir,
            run_name=args.run_name,
            # A requeued job resumes without this; it is for a job that you submit again.
            resume="auto" if args.resume else None,
        )
    )
    # Which rank is where; every rank must call a collective such as gather_json.
    hosts = manager.placement.gather_json(socket.gethostname())
    for host in sorted(set(hosts)):
        manager.say(f"{host}: ranks {[rank for rank, at in enumerate(hosts) if at == host]}")

    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    images = images.float() / 16
    train = TensorDataset(images[:1500], labels[:1500])
    val = TensorDataset(images[1500:], labels[1500:])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    result = manager.fit(model, train, val)
    manager.say(f"accuracy {result.metrics['accuracy']:.2%} after {result.steps} steps")


if __name__ == "__main__":
    main()
