"""python ddp_after.py, or: mgt run --num-gpus 2 ddp_after.py"""

import torch
from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

config = MultiGPUConfig(global_batch_size=32, epochs=4, max_grad_norm=1.0)
manager = MultiGPUTrainingManager(config)

torch.manual_seed(0)
x = torch.randn(1201, 20)
y = (x @ torch.randn(20, 5)).argmax(1)
train_set, val_set = TensorDataset(x[:1001], y[:1001]), TensorDataset(x[1001:], y[1001:])
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))

loader = DataLoader(train_set, shuffle=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = CosineAnnealingLR(optimizer, T_max=4 * manager.steps_per_epoch(loader))
result = manager.fit(
    model,
    loader,
    val_set,
    loss_fn=nn.CrossEntropyLoss(),
    optimizer=optimizer,
    scheduler=scheduler,
)
manager.say(f"accuracy {result.metrics['accuracy']:.4f}")
