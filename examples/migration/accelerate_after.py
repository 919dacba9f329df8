"""python accelerate_after.py, or: mgt run --num-gpus 2 accelerate_after.py"""

import torch
from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

config = MultiGPUConfig(batch_size=16, global_batch_size=32, max_grad_norm=1.0)
manager = MultiGPUTrainingManager(config)

torch.manual_seed(0)
x = torch.randn(1201, 20)
y = (x @ torch.randn(20, 5)).argmax(1)
train_set, val_set = TensorDataset(x[:1024], y[:1024]), TensorDataset(x[1024:], y[1024:])
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = CosineAnnealingLR(optimizer, T_max=4 * 1024 // 32)
model, loader, _ = manager.setup_training(
    model,
    DataLoader(train_set, shuffle=False),
    loss_fn=nn.CrossEntropyLoss(),
    optimizer=optimizer,
    scheduler=scheduler,
)

for epoch in range(manager.trainer.epoch, 4):
    for batch in loader:
        manager.trainer.train_step(batch)
    metrics = manager.evaluate(val_set)
    manager.say(f"epoch {epoch}: accuracy {metrics['accuracy']:.4f}")
    manager.log(**metrics)
    manager.save_checkpoint()
manager.finish()
