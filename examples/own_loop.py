"""Keep your own loop over epochs and batches: `train_step`, your own logging, when to validate.

    python examples/own_loop.py                                # all GPUs, or the CPU
    mgt run --num-gpus 2 examples/own_loop.py --epochs 20
    python examples/own_loop.py --run-name mine                # stop it with Ctrl-C, then
    python examples/own_loop.py --run-name mine --resume       # it continues inside its epoch

A regression on scikit-learn's diabetes data. `train_step` does everything from forward to the
learning rate; the loop decides when to log, validate, save and stop.
"""

import argparse

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import TensorDataset

from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager


class Remembered:
    """A dict that checkpoints save and restore."""

    def __init__(self, values: dict) -> None:
        self.values = values

    def state_dict(self) -> dict:
        return dict(self.values)

    def load_state_dict(self, state: dict) -> None:
        self.values.update(state)


def load_data() -> tuple[TensorDataset, TensorDataset]:
    inputs, targets = (torch.tensor(x, dtype=torch.float32) for x in load_diabetes(return_X_y=True))
    inputs = inputs * 20  # spread 1
    targets = ((targets - targets.mean()) / targets.std()).unsqueeze(1)
    return TensorDataset(inputs[:350], targets[:350]), TensorDataset(inputs[350:], targets[350:])


def main() -> None:
    parser = argparse.ArgumentParser(description="A regression with its own loop.")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--patience", type=int, default=5, help="epochs without a better loss")
    parser.add_argument("--batch-size", type=int, default=32, help="over all GPUs")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--run-name", help="the run's folder: runs/custom/NAME; default: the time")
    parser.add_argument("--resume", action="store_true", help="continue that run")
    args = parser.parse_args()

    manager = MultiGPUTrainingManager(
        MultiGPUConfig(
            global_batch_size=args.batch_size,
            epochs=args.epochs,
            max_grad_norm=1.0,
            run_name=args.run_name,
            resume="auto" if args.resume else None,
            loggers=["csv"],  # metrics.csv in the run's folder
        )
    )
    train, val = load_data()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    seen = {"best": float("inf"), "epoch": -1}  # saved with the run, as it decides when to stop

    model, train_loader, _ = manager.setup_training(
        *(model, train, val),
        loss_fn=nn.SmoothL1Loss(),
        optimizer=optimizer,
        states={"seen": Remembered(seen)},
    )
    trainer = manager.trainer
    for epoch in range(trainer.epoch, args.epochs):
        for batch in train_loader:
            result = trainer.train_step(batch)
            if result.moved and result.step % 10 == 0:
                manager.log(gradient=result.grad_norm, weights=model[0].weight.norm())
        # Over all ranks and every sample once; every rank must call it.
        val_loss = manager.evaluate()["loss"]
        manager.log(**{"val/loss": val_loss})
        manager.say(f"epoch {epoch + 1}: validation loss {val_loss:.4f}")
        better = val_loss < seen["best"]
        if better:
            seen.update(best=val_loss, epoch=epoch)
        manager.save_checkpoint(best=better, wait=False)  # written beside training
        if epoch - seen["epoch"] >= args.patience:
            manager.say(f"no better loss for {args.patience} epochs")
            break
    manager.finish()
    manager.say(f"best validation loss {seen['best']:.4f} in epoch {seen['epoch'] + 1}")


if __name__ == "__main__":
    main()
