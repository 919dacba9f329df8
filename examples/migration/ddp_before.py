"""torchrun --standalone --nproc-per-node=2 ddp_before.py"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")

torch.manual_seed(0)
x = torch.randn(1201, 20)
y = (x @ torch.randn(20, 5)).argmax(1)
train_set, val_set = TensorDataset(x[:1001], y[:1001]), TensorDataset(x[1001:], y[1001:])
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)).to(device)
ddp = DistributedDataParallel(model, device_ids=[device.index] if cuda else None)

sampler = DistributedSampler(train_set, shuffle=False)
loader = DataLoader(train_set, batch_size=32 // world, sampler=sampler)
val_loader = DataLoader(val_set, batch_size=64, sampler=DistributedSampler(val_set, shuffle=False))
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4 * len(loader))
loss_fn = nn.CrossEntropyLoss()

for epoch in range(4):
    sampler.set_epoch(epoch)
    ddp.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss_fn(ddp(inputs.to(device)), targets.to(device)).backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    ddp.eval()
    right = torch.zeros(2, device=device)
    with torch.no_grad():
        for inputs, targets in val_loader:
            found = ddp(inputs.to(device)).argmax(1)
            right += torch.tensor([(found == targets.to(device)).sum(), len(targets)]).to(device)
    dist.all_reduce(right)
    if rank == 0:
        print(f"epoch {epoch}: accuracy {right[0] / right[1]:.4f}")
        torch.save(model.state_dict(), "model.pt")
dist.destroy_process_group()
