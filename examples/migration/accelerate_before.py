"""accelerate launch --num_processes 2 accelerate_before.py"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(gradient_accumulation_steps=2)

set_seed(0)
x = torch.randn(1201, 20)
y = (x @ torch.randn(20, 5)).argmax(1)
train_set, val_set = TensorDataset(x[:1024], y[:1024]), TensorDataset(x[1024:], y[1024:])
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4 * 1024 // 32)
loader, val_loader = DataLoader(train_set, batch_size=16), DataLoader(val_set, batch_size=64)
model, optimizer, loader, val_loader, scheduler = accelerator.prepare(
    model, optimizer, loader, val_loader, scheduler
)

for epoch in range(4):
    model.train()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    right = count = 0
    for inputs, targets in val_loader:
        with torch.no_grad():
            found = model(inputs).argmax(1)
        found, targets = accelerator.gather_for_metrics((found, targets))
        right, count = right + (found == targets).sum().item(), count + len(targets)
    accelerator.print(f"epoch {epoch}: accuracy {right / count:.4f}")
    accelerator.save_state("state")
accelerator.end_training()
