"""python lightning_after.py, or: mgt run --num-gpus 2 lightning_after.py"""

import torch
import torch.nn.functional as F
from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

config = MultiGPUConfig(
    global_batch_size=32,
    epochs=4,
    max_grad_norm=1.0,
    scheduler_unit="epoch",
    early_stopping_patience=3,
)
manager = MultiGPUTrainingManager(config)

torch.manual_seed(0)
x = torch.randn(1201, 20)
y = torch.sin(x @ torch.randn(20, 1))
train_set, val_set = TensorDataset(x[:1001], y[:1001]), TensorDataset(x[1001:], y[1001:])


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, inputs):
        return self.net(inputs)


def training_step(model, batch):
    inputs, targets = batch
    return F.smooth_l1_loss(model(inputs), targets)


def validation_step(model, batch, metrics):
    inputs, targets = batch
    outputs = model(inputs)
    metrics.add("loss", F.smooth_l1_loss(outputs, targets, reduction="sum"), len(targets))
    metrics.add("mae", F.l1_loss(outputs, targets, reduction="sum"), len(targets))


manager.fit(
    Regressor(),
    DataLoader(train_set, shuffle=False),
    val_set,
    loss_fn=training_step,
    eval_fn=validation_step,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    scheduler=lambda optimizer: StepLR(optimizer, step_size=1, gamma=0.7),
)
