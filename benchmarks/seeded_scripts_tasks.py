# ruff: noqa: E501
"""Scripts for `seeded_bugs.py` of many tasks: detection, segmentation, retrieval, sequences, value learning.

Written from the documentation alone. As in the other files: BUGS maps a name to what the cause must say and to the
script, CORRECT a name to the script.
"""

from __future__ import annotations

HEADER = """
import argparse, collections, copy, dataclasses, functools, itertools, json, math, os, random, tempfile, time
from pathlib import Path
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import *
from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager, ShardedStream

def points(n=95, width=6, classes=3, seed=11):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(n, width, generator=random)
    return x, (x[:, :classes] + 0.3 * torch.randn(n, classes, generator=random)).argmax(1)

def net(width=6, out=3, hidden=12):
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, out))
"""

DATA = r"data per rank|a sample (differs|looks)|generator|(not those|other|not the) (that one rank sees|samples)|sampler"
STATE = r"buffer .*(not synchronised|follows)|over the batch as a whole|mixes the samples|keeps .*(state|statistics|between)|remembers|earlier batch"
WHOLE = r"over the batch as a whole|in-batch pairs|mixes the samples"
UNWEIGHTED = r"not weighted"
FEED = r"(skips|other|not the same|own) .*(batch|data)|data per rank|place in the data|steps"
NOISE = r"draws (random|noise|from)|generator|noise"
BY_WORLD = r"number of ranks|world size|WORLD_SIZE|world_size"
CHANGED = (
    r"parameter .*(is|was) changed|replicas? .*differ|other weights|weights .*(changed|differ)"
)
LEFT = r"a rank has left|ranks? .* (left|stopped|hang)|control flow|steps"

BUGS: dict[str, tuple[str, str]] = {
    # --- data ---
    "label_noise_of_each_process": (
        DATA,
        """
rank = int(os.environ.get("RANK", 0))
x, y = points()
noisy = torch.Generator().manual_seed(100 + rank)
flip = torch.rand(len(y), generator=noisy) < 0.2
y = torch.where(flip, torch.randint(0, 3, y.shape, generator=noisy), y)

class Noisy(Dataset):
    def __len__(self):
        return len(x)
    def __getitem__(self, i):
        return x[i], y[i]

manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = net()
manager.fit(model, Noisy(), optimizer=torch.optim.SGD(model.parameters(), 0.1))
""",
    ),
    "class_balance_of_own_shard": (
        DATA,
        """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
rank, world = manager.placement.rank, manager.placement.world_size
x, y = points()
counts = torch.bincount(y[rank::world], minlength=3).float()
weights = (1 / counts)[y]
sampler = WeightedRandomSampler(weights, 64, generator=torch.Generator().manual_seed(3))
model = net()
manager.fit(model, DataLoader(TensorDataset(x, y), batch_size=16, sampler=sampler), loss_fn=nn.CrossEntropyLoss(),
            optimizer=torch.optim.AdamW(model.parameters(), 1e-2))
""",
    ),
    "standardised_with_own_share": (
        DATA,
        """
@dataclasses.dataclass
class Settings:
    batch: int = 15
    lr: float = 0.05
    rank: int = int(os.environ.get("RANK", "0"))
    world: int = int(os.environ.get("WORLD_SIZE", "1"))

class Table(Dataset):
    def __init__(self, s):
        x, _ = points()
        mine = x[s.rank::s.world]  # enough rows to estimate the moments
        self.x = (x - mine.mean(0)) / mine.std(0)
        self.y = x[:, :1].sin()
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        return self.x[i], self.y[i]

s = Settings()
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=s.batch, epochs=3))
model = net(out=1)
manager.fit(model, Table(s), loss_fn=nn.HuberLoss(), optimizer=torch.optim.SGD(model.parameters(), s.lr, momentum=0.9))
""",
    ),
    "mixing_drawn_per_process_in_the_loop": (
        FEED + "|" + DATA,
        """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
x, y = points()
data = TensorDataset(x, F.one_hot(y, 3).float())
rng = np.random.default_rng(50 + manager.placement.rank)
model = net()
model, loader, _ = manager.setup_training(model, data, loss_fn=nn.MSELoss(), optimizer=torch.optim.SGD(model.parameters(), 0.1))
for epoch in range(manager.trainer.epoch, 2):
    for inputs, targets in loader:
        keep = float(rng.beta(2, 2))
        manager.trainer.train_step((inputs * keep, targets * keep))
manager.finish()
""",
    ),
    "difficulty_raised_by_own_running_loss": (
        FEED + "|" + DATA,
        """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=3))
x, y = points()
model = net()
model, loader, _ = manager.setup_training(model, TensorDataset(x, y), optimizer=torch.optim.SGD(model.parameters(), 0.3))
running, noise = 1.1, 0.0
for epoch in range(3):
    for inputs, targets in loader:
        result = manager.trainer.train_step((inputs * (1 + noise), targets))
        running = 0.5 * running + 0.5 * float(result.loss)
        noise = 0.1 * max(0.0, 1.1 - running)
manager.finish()
""",
    ),
    "prototype_of_the_first_sample_seen": (
        DATA,
        """
class Relative(Dataset):
    '''Each row relative to the first row of its class that was read.'''
    def __init__(self, x, y):
        self.x, self.y, self.first = x, y, {}
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        start = self.first.setdefault(int(self.y[i]), self.x[i])
        return self.x[i] - start, self.y[i]

manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = net()
manager.fit(model, Relative(*points()), optimizer=torch.optim.Adam(model.parameters(), 1e-2))
""",
    ),
    "stream_shuffled_with_seed_of_rank": (
        DATA,
        """
rank = int(os.environ.get("RANK", 0))

class Shuffled(IterableDataset):
    def __init__(self, source, size, seed):
        self.source, self.size, self.seed = source, size, seed
    def __iter__(self):
        rng, held = random.Random(self.seed), []
        for item in self.source:
            held.append(item)
            if len(held) == self.size:
                yield held.pop(rng.randrange(self.size))
        rng.shuffle(held)
        yield from held

x, y = points()
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = net()
manager.fit(model, Shuffled(list(zip(x, y)), 20, 7 + rank), optimizer=torch.optim.SGD(model.parameters(), 0.1))
""",
    ),
    "pairs_mixed_by_the_collator": (
        r"collate|in-batch pairs|over the batch as a whole|data per rank|sample",
        """
def collate(rows):
    x = torch.stack([r[0] for r in rows])
    y = torch.stack([F.one_hot(r[1], 3).float() for r in rows])
    return 0.7 * x + 0.3 * x.roll(1, 0), 0.7 * y + 0.3 * y.roll(1, 0)

x, y = points()
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=15, epochs=2))
model = net()
loader = DataLoader(TensorDataset(x, y), batch_size=15, shuffle=True, collate_fn=collate)
manager.fit(model, loader, loss_fn=nn.CrossEntropyLoss(), optimizer=torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
""",
    ),
    "positions_counted_from_the_end_of_the_padding": (
        r"pad|longest|shape|length",
        """
torch.manual_seed(0)
texts = [torch.randint(1, 20, (n,)) for n in torch.randint(3, 11, (80,)).tolist()]
labels = torch.tensor([int(t.sum() > 60) for t in texts])

def collate(rows):
    ids = nn.utils.rnn.pad_sequence([r[0] for r in rows], batch_first=True)
    return ids, torch.stack([r[1] for r in rows])

class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.gru, self.out = nn.Embedding(20, 8), nn.GRU(8, 10, batch_first=True), nn.Linear(10, 2)
    def forward(self, ids):
        return self.out(self.gru(self.words(ids))[0][:, -1])

manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = Reader()
loader = DataLoader(list(zip(texts, labels)), batch_size=16, shuffle=True, collate_fn=collate)
manager.fit(model, loader, optimizer=torch.optim.Adam(model.parameters(), 1e-2))
""",
    ),
    "short_parts_left_out": (
        r"cuts or collects",
        """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=3))
model = net()
model, loader, _ = manager.setup_training(model, TensorDataset(*points()), optimizer=torch.optim.SGD(model.parameters(), 0.1))
for epoch in range(3):
    for inputs, targets in loader:
        manager.trainer.train_step((inputs[:5], targets[:5]))  # the slow layers like small batches
manager.finish()
""",
    ),
    "replay_sampled_with_seed_of_rank": (
        DATA + "|" + FEED,
        """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, max_steps=12))
states, actions = points(200)
rewards = states[:, 0] * (actions == 0)
random.seed(9 + manager.placement.dp_rank)

def loss_fn(model, batch):
    s, a, r = batch
    return F.smooth_l1_loss(model(s).gather(1, a[:, None])[:, 0], r)

model = net()
model, *_ = manager.setup_training(model, loss_fn=loss_fn, optimizer=torch.optim.Adam(model.parameters(), 1e-2))
for step in range(manager.step, 12):
    rows = torch.tensor(random.sample(range(200), 16))
    manager.trainer.train_step(manager.shard((states[rows], actions[rows], rewards[rows])))
manager.finish()
""",
    ),
    # --- what the loss weighs ---
    "translation_mean_over_words": (
        UNWEIGHTED,
        """
torch.manual_seed(1)
V = 14
source = [torch.randint(2, V, (n,)) for n in torch.randint(2, 8, (75,)).tolist()]
pairs = [(s, s.flip(0)) for s in source]

def collate(rows):
    pad = lambda part: F.pad(nn.utils.rnn.pad_sequence(part, batch_first=True), (0, 8))[:, :8]
    return pad([r[0] for r in rows]), pad([r[1] for r in rows])

class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(V, 8)
        self.enc, self.dec = nn.GRU(8, 12, batch_first=True), nn.GRU(8, 12, batch_first=True)
        self.out = nn.Linear(12, V)
    def forward(self, src, tgt):
        _, h = self.enc(self.emb(src))
        return self.out(self.dec(self.emb(F.pad(tgt[:, :-1], (1, 0), value=1)), h)[0])

def loss_fn(model, batch):
    src, tgt = batch
    return F.cross_entropy(model(src, tgt).flatten(0, 1), tgt.flatten(), ignore_index=0)

manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
model = Seq2Seq()
manager.fit(model, DataLoader(pairs, batch_size=12, shuffle=True, collate_fn=collate), loss_fn=loss_fn,
            optimizer=torch.optim.Adam(model.parameters(), 5e-3))
""",
    ),
    "boxes_over_positive_anchors": (
        UNWEIGHTED,
        """
torch.manual_seed(2)
images = torch.randn(60, 1, 8, 8)
positive = (torch.rand(60, 16) < 0.3)
boxes = torch.rand(60, 16, 4)

class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU())
        self.cls, self.reg = nn.Conv2d(8, 1, 1), nn.Conv2d(8, 4, 1)
    def forward(self, x):
        h = self.body(x)
        return self.cls(h).flatten(1), self.reg(h).flatten(2).transpose(1, 2)

def loss_fn(model, batch):
    x, pos, box = batch
    cls, reg = model(x)
    focal = F.binary_cross_entropy_with_logits(cls, pos.to(cls.dtype), reduction="sum")
    l1 = (F.smooth_l1_loss(reg, box.to(reg.dtype), reduction="none").sum(-1) * pos).sum()
    return (focal + l1) / pos.sum().clamp(min=1)

manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=10, epochs=2))
model = Detector()
manager.fit(model, TensorDataset(images, positive, boxes), loss_fn=loss_fn, optimizer=torch.optim.SGD(model.parameters(), 0.01))
""",
    ),
    "sum_over_the_expected_share": (
        r"sum|" + BY_WORLD,
        """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
share = 16 / manager.placement.world_size
model = net(out=1)
x, _ = points()

def loss_fn(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y, reduction="sum") / share

manager.fit(model, TensorDataset(x, x[:, :1] * x[:, 1:2]), loss_fn=loss_fn, optimizer=torch.optim.SGD(model.parameters(), 0.02))
""",
    ),
    "sum_over_the_global_batch": (
        r"sum",
        """
BATCH = 15
torch.manual_seed(0)
series = torch.randn(80, 9, 1).cumsum(1)

class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(1, 8, batch_first=True), nn.Linear(8, 1)
    def forward(self, x):
        return self.out(self.rnn(x)[0])

def loss_fn(model, batch):
    (x,) = batch
    return (model(x[:, :-1]) - x[:, 1:]).square().sum() / (BATCH * 8)

manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=BATCH, epochs=2, max_grad_norm=10.0))
model = Forecast()
manager.fit(model, TensorDataset(series), loss_fn=loss_fn, optimizer=torch.optim.RMSprop(model.parameters(), 5e-3))
""",
    ),
    "loss_times_world_in_the_criterion": (
        BY_WORLD,
        """
class Scaled(nn.Module):
    '''DDP averages the gradients, so multiply by the number of processes.'''
    def forward(self, output, target):
        factor = dist.get_world_size() if dist.is_initialized() else 1
        return F.cross_entropy(output, target) * factor

manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = net()
manager.fit(model, TensorDataset(*points()), loss_fn=Scaled(), optimizer=torch.optim.SGD(model.parameters(), 0.05))
""",
    ),
    "loss_scaled_on_the_last_rank": (
        r"depends on the rank",
        """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
rank, world = manager.placement.rank, manager.placement.world_size

def loss_fn(model, batch):
    x, y = batch
    loss = F.cross_entropy(model(x), y)
    if rank == world - 1 and world > 1:
        loss = loss * 0.5  # this GPU is shared with another job
    return loss

model = net()
manager.fit(model, TensorDataset(*points()), loss_fn=loss_fn, optimizer=torch.optim.Adam(model.parameters(), 1e-2))
""",
    ),
    # --- the batch as a whole ---
    "flooded_loss": (
        WHOLE + r"|not a mean",
        """
def loss_fn(model, batch):
    x, y = batch
    loss = F.cross_entropy(model(x), y)
    return (loss - 1.1).abs() + 1.1

manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
model = net()
manager.fit(model, TensorDataset(*points()), loss_fn=loss_fn, optimizer=torch.optim.SGD(model.parameters(), 0.3))
""",
    ),
    "dual_encoder_with_batch_negatives": (
        WHOLE,
        """
class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.item = nn.Linear(6, 8), nn.Linear(4, 8)
        self.scale = nn.Parameter(torch.tensor(1.0))
    def forward(self, q, i):
        q, i = F.normalize(self.query(q), dim=1), F.normalize(self.item(i), dim=1)
        return self.scale.exp() * q @ i.T

def loss_fn(model, batch):
    logits = model(*batch)
    wanted = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, wanted) + F.cross_entropy(logits.T, wanted)) / 2

torch.manual_seed(0)
x, _ = points()
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = Towers()
manager.fit(model, TensorDataset(x, x[:, :4].sin()), loss_fn=loss_fn, optimizer=torch.optim.AdamW(model.parameters(), 1e-2))
""",
    ),
    "hardest_triplets_of_the_batch": (
        WHOLE,
        """
def batch_hard(model, batch):
    x, y = batch
    z = F.normalize(model(x), dim=1)
    distance = (z[:, None] - z[None]).square().sum(-1)
    same = y[:, None] == y[None]
    far = (distance * same).amax(1)
    near = (distance + 1e3 * same).amin(1)
    return F.relu(far - near + 0.3).mean()

manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=18, epochs=2))
model = net(out=4)
manager.fit(model, TensorDataset(*points()), loss_fn=batch_hard, optimizer=torch.optim.SGD(model.parameters(), 0.1))
""",
    ),
    "decorrelated_features": (
        WHOLE,
        """
def barlow(a, b):
    a, b = (a - a.mean(0)) / (a.std(0) + 1e-3), (b - b.mean(0)) / (b.std(0) + 1e-3)
    c = a.T @ b / len(a)
    return (c.diagonal() - 1).square().sum() + 0.01 * (c.square().sum() - c.diagonal().square().sum())

def loss_fn(model, batch):
    x, _ = batch
    return barlow(model(x), model(x * 0.9 + 0.05))

manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=24, epochs=2))
model = net(out=5)
manager.fit(model, TensorDataset(*points()), loss_fn=loss_fn, optimizer=torch.optim.SGD(model.parameters(), 0.02))
""",
    ),
    "targets_standardised_in_the_loss": (
        WHOLE,
        """
def loss_fn(model, batch):
    x, y = batch
    y = (y - y.mean()) / (y.std() + 1e-6)
    return F.l1_loss(model(x).squeeze(1), y)

x, _ = points()
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = net(out=1)
manager.fit(model, TensorDataset(x, 3 * x[:, 0] + 2), loss_fn=loss_fn, optimizer=torch.optim.Adam(model.parameters(), 1e-2))
""",
    ),
    "hardest_negatives_three_to_one": (
        WHOLE + "|" + UNWEIGHTED,
        """
def loss_fn(model, batch):
    x, y = batch
    losses = F.binary_cross_entropy_with_logits(model(x), y, reduction="none").flatten()
    positive = y.flatten() > 0
    many = int(positive.sum()) * 3
    negatives = losses[~positive].topk(min(many, int((~positive).sum()))).values
    return (losses[positive].sum() + negatives.sum()) / max(1, int(positive.sum()))

torch.manual_seed(4)
x = torch.randn(80, 6)
y = (torch.rand(80, 10) < 0.15).float()
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=10, epochs=2))
model = net(out=10)
manager.fit(model, TensorDataset(x, y), loss_fn=loss_fn, optimizer=torch.optim.SGD(model.parameters(), 0.05))
""",
    ),
    "queue_of_keys": (
        STATE,
        """
class Moco(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = net(out=8)
        self.register_buffer("queue", F.normalize(torch.randn(32, 8), dim=1))
    def forward(self, x):
        q = F.normalize(self.encoder(x), dim=1)
        with torch.no_grad():
            k = F.normalize(self.encoder(x * 1.05), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().T], 1) / 0.2
        if self.training:
            self.queue = torch.cat([self.queue, k])[-32:]
        return logits

def loss_fn(model, batch):
    logits = model(batch[0])
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device))

torch.manual_seed(3)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = Moco()
manager.fit(model, TensorDataset(points()[0]), loss_fn=loss_fn, optimizer=torch.optim.SGD(model.parameters(), 0.05))
""",
    ),
    "context_of_the_last_batch": (
        STATE,
        """
class Contextual(nn.Module):
    '''Feeds the average hidden state of the previous batch to the next.'''
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(6, 10), nn.Linear(10, 3)
        self.context = None
    def forward(self, x):
        start = x.new_zeros(10) if self.context is None else self.context
        h = self.cell(x, start.expand(len(x), -1))
        if self.training:
            self.context = h.detach().mean(0)
        return self.out(h)

torch.manual_seed(0)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = Contextual()
manager.fit(model, TensorDataset(*points()), optimizer=torch.optim.Adam(model.parameters(), 1e-2))
""",
    ),
    "rewards_over_a_running_spread": (
        STATE,
        """
class Spread:
    def __init__(self):
        self.mean, self.var = 0.0, 1.0
    def __call__(self, r):
        self.mean = 0.9 * self.mean + 0.1 * float(r.mean())
        self.var = 0.9 * self.var + 0.1 * float(r.var(unbiased=False))
        return (r - self.mean) / math.sqrt(self.var + 1e-6)

spread = Spread()

def policy_loss(model, batch):
    state, action, reward = batch
    logp = F.log_softmax(model(state), 1).gather(1, action[:, None])[:, 0]
    return -(logp * spread(reward)).mean()

x, y = points()
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = net()
manager.fit(model, TensorDataset(x, y, 4 * x[:, 0] + 1), loss_fn=policy_loss, optimizer=torch.optim.Adam(model.parameters(), 1e-2))
""",
    ),
    "batchnorm_in_a_residual_net": (
        r"BatchNorm .*normalises",
        """
class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.a, self.b = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.Conv2d(c, c, 3, padding=1, bias=False)
        self.na, self.nb = nn.BatchNorm2d(c), nn.BatchNorm2d(c)
    def forward(self, x):
        return F.relu(x + self.nb(self.b(F.relu(self.na(self.a(x))))))

torch.manual_seed(0)
images, labels = torch.randn(64, 1, 8, 8), torch.randint(0, 4, (64,))
model = nn.Sequential(nn.Conv2d(1, 6, 3, 2, 1), Block(6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2, schedule="cosine"))
manager.fit(model, TensorDataset(images, labels), optimizer=torch.optim.SGD(model.parameters(), 0.05, nesterov=True, momentum=0.9))
""",
    ),
    # --- beside the model ---
    "teacher_drawn_by_each_process": (
        r"beside the model|teacher|other (weights|values)|depends on the rank|differs? .*rank",
        """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = net()
torch.manual_seed(70 + manager.placement.rank)
teacher = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3)).eval().requires_grad_(False)

def loss_fn(model, batch):
    x, _ = batch
    device = next(model.parameters()).device
    soft = F.softmax(teacher.to(device, x.dtype)(x) / 2, 1)
    return F.kl_div(F.log_softmax(model(x) / 2, 1), soft, reduction="batchmean")

manager.fit(model, TensorDataset(*points()), loss_fn=loss_fn, optimizer=torch.optim.Adam(model.parameters(), 1e-2))
""",
    ),
    "target_network_renewed_less_often_on_more_ranks": (
        BY_WORLD + r"|target|beside the model|outside the model",
        """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=3))
world = manager.placement.world_size
q = net()
target = copy.deepcopy(q).requires_grad_(False)

def td(model, batch):
    s, a, r, after = batch
    best = target.to(s.device, s.dtype)(after).amax(1)
    return F.smooth_l1_loss(model(s).gather(1, a[:, None])[:, 0], r + 0.9 * best)

class Renew(Callback):
    def on_step_end(self, run, result):
        if result.step % (2 * world) == 0:
            target.load_state_dict(run.model.state_dict())

s, a = points()
data = TensorDataset(s, a, s[:, 0] * (a == 0), s.roll(1, 1))
manager.fit(q, data, loss_fn=td, optimizer=torch.optim.SGD(q.parameters(), 0.1), callbacks=[Renew()])
""",
    ),
    "noise_of_a_denoiser": (
        NOISE,
        """
class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net(out=6)
        self.random = torch.Generator().manual_seed(17)
    def forward(self, x):
        noise = torch.randn(x.shape, generator=self.random).to(x)
        return self.net(x + 0.3 * noise)

x, _ = points()
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = Denoiser()
manager.fit(model, TensorDataset(x, x), loss_fn=nn.MSELoss(), optimizer=torch.optim.Adam(model.parameters(), 1e-2))
""",
    ),
    "augmented_with_a_generator_of_the_rank": (
        r"augment|generator|draws",
        """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
mine = torch.Generator().manual_seed(manager.placement.dp_rank)

def augment(batch, random):
    x, y = batch
    return x + 0.2 * torch.randn(x.shape, generator=mine).to(x), y

model = net()
manager.fit(model, TensorDataset(*points()), augment=augment, optimizer=torch.optim.SGD(model.parameters(), 0.1))
""",
    ),
    # --- settings ---
    "base_batch_shared_out": (
        r"base_batch_size|learning rate|lr\b",
        """
world = int(os.environ.get("WORLD_SIZE", 1))
config = MultiGPUConfig(global_batch_size=24, epochs=2, lr_scaling="linear", base_batch_size=24 // world, learning_rate=0.003)
manager = MultiGPUTrainingManager(config)
manager.fit(net(), TensorDataset(*points()))
""",
    ),
    "decay_on_the_main_rank_only": (
        r"weight.decay",
        """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
decay = 0.1 if manager.placement.is_main else 0.0  # regularise once, not once per GPU
model = net()
manager.fit(model, TensorDataset(*points()), optimizer=torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=decay))
""",
    ),
    "momentum_root_of_world": (
        r"momentum",
        """
world = int(os.environ.get("WORLD_SIZE", 1))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9 ** (1 / world))
manager.fit(model, TensorDataset(*points()), optimizer=optimizer)
""",
    ),
    "betas_of_more_workers": (
        r"betas",
        """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
w = manager.placement.dp_size
model = net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 1 - 0.001 * w))
manager.fit(model, TensorDataset(*points()), optimizer=optimizer)
""",
    ),
    "rate_from_a_list_by_rank": (
        r"learning rate|\blr\b|rate of",
        """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
rates = [0.1, 0.05, 0.02, 0.01]
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=rates[manager.placement.rank])
manager.fit(model, TensorDataset(*points()), optimizer=optimizer)
""",
    ),
    "warmup_shared_out": (
        r"warmup|warm-up|learning rate|\blr\b",
        """
parser = argparse.ArgumentParser()
parser.add_argument("--warmup", type=int, default=12)
args, _ = parser.parse_known_args()
world = int(os.environ.get("WORLD_SIZE", 1))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=4, warmup_steps=args.warmup // world, schedule="linear"))
model = net()
manager.fit(model, TensorDataset(*points()), optimizer=torch.optim.SGD(model.parameters(), 0.2))
""",
    ),
    "step_size_of_the_schedule_over_world": (
        r"learning rate|schedul|\blr\b",
        """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
world = manager.placement.world_size
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=max(1, 6 // world), gamma=0.5)
manager.fit(model, TensorDataset(*points()), optimizer=optimizer, scheduler=scheduler)
""",
    ),
    "warm_up_by_samples_of_a_rank": (
        r"learning rate|\blr\b|rate .*differ",
        """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, loader, _ = manager.setup_training(model, TensorDataset(*points()), optimizer=optimizer)
seen = 0
for epoch in range(2):
    for batch in loader:
        seen += len(batch[0])
        for group in manager.optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, seen / 64)
        manager.trainer.train_step(batch)
manager.finish()
""",
    ),
    "epochs_shared_out": (
        r"epochs|steps",
        """
world = int(os.environ.get("WORLD_SIZE", 1))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=6 // world, schedule="cosine"))
model = net()
manager.fit(model, TensorDataset(*points()), optimizer=torch.optim.SGD(model.parameters(), 0.1))
""",
    ),
    "global_batch_from_world": (
        r"global_batch_size|batch.*(grow|number of ranks)",
        """
world = int(os.environ.get("WORLD_SIZE", 1))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=8 * world, epochs=2))
model = net()
manager.fit(model, TensorDataset(*points()), optimizer=torch.optim.SGD(model.parameters(), 0.1))
""",
    ),
    "label_smoothing_by_world": (
        BY_WORLD,
        """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
criterion = nn.CrossEntropyLoss(label_smoothing=0.02 * manager.placement.world_size)
model = net()
manager.fit(model, TensorDataset(*points()), loss_fn=criterion, optimizer=torch.optim.SGD(model.parameters(), 0.1))
""",
    ),
    # --- weights and gradients ---
    "pruned_on_the_main_rank": (
        CHANGED,
        """
class Prune(Callback):
    def on_step_end(self, run, result):
        if run.placement.is_main and result.step % 3 == 0:
            with torch.no_grad():
                weight = run.model[0].weight
                weight[weight.abs() < 0.05] = 0

manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = net()
manager.fit(model, TensorDataset(*points()), optimizer=torch.optim.SGD(model.parameters(), 0.1), callbacks=[Prune()])
""",
    ),
    "weights_loaded_per_rank_after_setup": (
        CHANGED + r"|start(s|ed)? with",
        """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = net()
model, loader, _ = manager.setup_training(model, TensorDataset(*points()), optimizer=torch.optim.SGD(model.parameters(), 0.1))
torch.manual_seed(manager.placement.rank)
pretrained = nn.Linear(6, 12)
model[0].load_state_dict(pretrained.state_dict())
for epoch in range(2):
    manager.train_epoch(loader, epoch)
manager.finish()
""",
    ),
    "first_layer_frozen_on_other_ranks": (
        r"frozen|requires_grad|no gradient|not train|parameter",
        """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = net()
x, y = points()

def loss_fn(model, batch):
    x, y = batch
    hidden = model[1](model[0](x))
    if manager.placement.rank:
        hidden = hidden.detach()  # the stem is trained by the first GPU
    return F.cross_entropy(model[2](hidden), y)

manager.fit(model, TensorDataset(x, y), loss_fn=loss_fn, optimizer=torch.optim.SGD(model.parameters(), 0.2))
""",
    ),
    "gradients_summed_by_the_optimizer": (
        r"gradients? .*(added|sum|once more|again|over the ranks)|optimizer .*(rank|moves)|all.reduce",
        """
class Synced(torch.optim.SGD):
    '''Adds up the gradients of all workers.'''
    def step(self, closure=None):
        if dist.is_initialized():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        dist.all_reduce(p.grad)
        return super().step(closure)

manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = net()
manager.fit(model, TensorDataset(*points()), optimizer=Synced(model.parameters(), lr=0.05))
""",
    ),
    "langevin_noise_of_each_rank": (
        r"optimizer|parameter .*changed|generator|draws",
        """
class Langevin(torch.optim.Optimizer):
    def __init__(self, params, lr, seed):
        super().__init__(params, {"lr": lr})
        self.random = torch.Generator().manual_seed(seed)
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    noise = torch.randn(p.shape, generator=self.random, dtype=p.dtype)
                    p.add_(p.grad, alpha=-group["lr"]).add_(noise.to(p), alpha=1e-3)

manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = net()
manager.fit(model, TensorDataset(*points()), optimizer=Langevin(model.parameters(), 0.1, manager.placement.rank))
""",
    ),
    "stopped_by_own_validation_share": (
        LEFT,
        """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=6))
x, y = points(80)
model = net()
model, loader, val_loader = manager.setup_training(model, TensorDataset(x, y), TensorDataset(*points(30, seed=2)),
                                                   optimizer=torch.optim.SGD(model.parameters(), 0.3))
for epoch in range(6):
    for batch in loader:
        manager.trainer.train_step(batch)
        with torch.no_grad():
            mine = [float(F.cross_entropy(model(a), b)) for a, b in val_loader]
        if min(mine) < 0.9:
            break
    else:
        continue
    break
manager.finish()
""",
    ),
    # --- metrics ---
    "overlap_averaged_over_batches": (
        r"mean of means|metric",
        """
def eval_fn(model, batch, metrics):
    x, y = batch
    guess = model(x).argmax(1)
    both, either = ((guess == 1) & (y == 1)).sum(), ((guess == 1) | (y == 1)).sum()
    metrics.add("loss", F.cross_entropy(model(x), y, reduction="sum"), len(y))
    metrics.add("iou", both / either.clamp(min=1), 1)

x, y = points()
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = net()
manager.fit(model, TensorDataset(x, y), TensorDataset(*points(45, seed=8)), eval_fn=eval_fn, optimizer=torch.optim.SGD(model.parameters(), 0.1))
""",
    ),
    "threshold_at_the_median_of_the_batch": (
        r"metric|over the batch as a whole",
        """
def eval_fn(model, batch, metrics):
    x, y = batch
    scores = model(x).squeeze(1)
    metrics.add("loss", F.mse_loss(scores, y, reduction="sum"), len(y))
    metrics.add("above", ((scores > scores.median()) == (y > 0)).sum(), len(y))

x, _ = points()
v, _ = points(45, seed=8)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = net(out=1)
manager.fit(model, TensorDataset(x, x[:, 0]), TensorDataset(v, v[:, 0]), eval_fn=eval_fn,
            loss_fn=lambda model, batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1]), optimizer=torch.optim.SGD(model.parameters(), 0.1))
""",
    ),
}

CORRECT: dict[str, str] = {
    "log_file_of_each_rank": """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
rank = manager.placement.rank
log = open(Path(tempfile.mkdtemp()) / f"rank{rank}.log", "w")

class Write(Callback):
    def on_step_end(self, run, result):
        print(f"[{rank}] {result.step} {float(result.loss):.4f}", file=log, flush=True)

model = net()
manager.fit(model, TensorDataset(*points()), optimizer=torch.optim.SGD(model.parameters(), 0.1), callbacks=[Write()])
log.close()
""",
    "world_printed_and_rate_left_alone": """
world = int(os.environ.get("WORLD_SIZE", 1))
lr = 0.1 * 16 / 32  # by the global batch, which does not depend on the ranks
print(f"training on {world} ranks, 16 // {world} = {16 // world} samples each, rate {lr}")
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = net()
result = manager.fit(model, TensorDataset(*points()), optimizer=torch.optim.SGD(model.parameters(), lr))
manager.say(f"{result.metrics}")
""",
    "generator_of_index_and_epoch": """
class Jittered(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        rng = np.random.default_rng([1234, i])
        return self.x[i] + torch.from_numpy(rng.normal(0, 0.1, self.x[i].shape)).float(), self.y[i]

manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = net()
manager.fit(model, Jittered(*points()), optimizer=torch.optim.Adam(model.parameters(), 1e-2))
""",
    "crops_from_a_generator_of_the_rank": """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))

class Crops(Dataset):
    def __init__(self, images, masks):
        self.images, self.masks = images, masks
        self.rng = np.random.default_rng(1234 + manager.placement.rank)
    def __len__(self):
        return len(self.images)
    def __getitem__(self, i):
        top, left = self.rng.integers(0, 4, 2)
        cut = np.s_[..., top:top + 8, left:left + 8]
        return self.images[i][cut], self.masks[i][cut]

torch.manual_seed(0)
images = torch.randn(70, 1, 12, 12)
masks = (images[:, 0] > 0).long()
model = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 2, 1))
manager.fit(model, Crops(images, masks), loss_fn=nn.CrossEntropyLoss(), optimizer=torch.optim.Adam(model.parameters(), 1e-2))
""",
    "crops_from_the_global_generators": """
class Crops(Dataset):
    def __init__(self, images, masks):
        self.images, self.masks = images, masks
    def __len__(self):
        return len(self.images)
    def __getitem__(self, i):
        top, left = random.randint(0, 4), int(np.random.randint(0, 4))
        image = self.images[i][..., top:top + 8, left:left + 8]
        mask = self.masks[i][..., top:top + 8, left:left + 8]
        return (image.flip(-1), mask.flip(-1)) if torch.rand(()) < 0.5 else (image, mask)

torch.manual_seed(0)
images = torch.randn(70, 1, 12, 12)
model = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU(), nn.Conv2d(6, 2, 1))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(model, Crops(images, (images[:, 0] > 0).long()), loss_fn=nn.CrossEntropyLoss(), optimizer=torch.optim.Adam(model.parameters(), 1e-2))
""",
    "predictions_gathered_after_each_epoch": """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = net()
model, loader, val_loader = manager.setup_training(model, TensorDataset(*points()), TensorDataset(*points(41, seed=3)),
                                                   optimizer=torch.optim.SGD(model.parameters(), 0.1))
for epoch in range(2):
    manager.train_epoch(loader, epoch)
    manager.validate_epoch(val_loader)
    with torch.no_grad():
        outputs = manager.gather((batch, model(batch[0]).argmax(1)) for batch in val_loader)
    manager.say(f"{type(outputs)}")
    if manager.should_stop:
        break
manager.finish()
""",
    "gradient_hook_on_a_parameter": """
model = net()
model[0].weight.register_hook(lambda g: g * 0.5)
model[2].bias.register_hook(lambda g: g.clamp(-0.01, 0.01))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
manager.fit(model, TensorDataset(*points()), optimizer=torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
""",
    "averaged_model_of_torch": """
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = net()
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

class Average(Callback):
    def on_step_end(self, run, result):
        average.update_parameters(run.model)

manager.fit(model, TensorDataset(*points()), optimizer=torch.optim.SGD(model.parameters(), 0.1), callbacks=[Average()], states={"average": average})
manager.say(f"{sum(p.sum() for p in average.parameters())}")
""",
    "backbone_frozen_with_its_batchnorm": """
class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(1, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.head = nn.Linear(24, 3)
        self.body.requires_grad_(False)
    def train(self, mode=True):
        super().train(mode)
        self.body.eval()
        return self
    def forward(self, x):
        return self.head(self.body(x))

torch.manual_seed(1)
data = TensorDataset(torch.randn(60, 1, 8, 8), torch.randint(0, 3, (60,)))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
model = Frozen()
manager.fit(model, data, optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1))
""",
    "sampler_seeded_by_epoch": """
class Curriculum(Sampler):
    '''Short rows first in the first epoch, shuffled afterwards.'''
    def __init__(self, lengths, seed):
        self.lengths, self.seed, self.epoch = lengths, seed, 0
    def set_epoch(self, epoch):
        self.epoch = epoch
    def __len__(self):
        return len(self.lengths)
    def __iter__(self):
        order = sorted(range(len(self.lengths)), key=self.lengths.__getitem__)
        if self.epoch:
            random.Random(self.seed + self.epoch).shuffle(order)
        return iter(order)

x, y = points()
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=3))
model = net()
loader = DataLoader(TensorDataset(x, y), batch_size=16, sampler=Curriculum(x.abs().sum(1).tolist(), 3))
manager.fit(model, loader, optimizer=torch.optim.SGD(model.parameters(), 0.1))
""",
    "dataclass_of_settings": """
@dataclasses.dataclass
class Settings:
    lr: float = 0.05
    batch: int = 16
    rank: int = int(os.environ.get("RANK", 0))
    world: int = int(os.environ.get("WORLD_SIZE", 1))
    verbose: bool = bool(os.environ.get("VERBOSE"))
    def describe(self):
        return json.dumps(dataclasses.asdict(self))

s = Settings()
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=s.batch, epochs=2, run_name=None))
if s.verbose or s.rank == 0:
    print(s.describe())
model = net()
manager.fit(model, TensorDataset(*points()), optimizer=torch.optim.AdamW(model.parameters(), s.lr))
""",
    "sign_momentum_optimizer": """
class SignMomentum(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                m.lerp_(p.grad, 1 - group["beta"])
                p.add_(torch.tanh(m * 100), alpha=-group["lr"])

manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = net()
manager.fit(model, TensorDataset(*points()), optimizer=SignMomentum(model.parameters(), 5e-3))
""",
    "sequence_of_schedulers": """
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingWarmRestarts, SequentialLR
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=3))
model = net()
optimizer = torch.optim.SGD(model.parameters(), 0.2)
scheduler = SequentialLR(optimizer, [ConstantLR(optimizer, 0.1, 3), CosineAnnealingWarmRestarts(optimizer, 4)], milestones=[3])
manager.fit(model, TensorDataset(*points()), optimizer=optimizer, scheduler=scheduler)
""",
    "boxes_with_weight": """
torch.manual_seed(2)
images, positive, boxes = torch.randn(60, 1, 8, 8), torch.rand(60, 16) < 0.3, torch.rand(60, 16, 4)

class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU())
        self.cls, self.reg = nn.Conv2d(8, 1, 1), nn.Conv2d(8, 4, 1)
    def forward(self, x):
        h = self.body(x)
        return self.cls(h).flatten(1), self.reg(h).flatten(2).transpose(1, 2)

def loss_fn(model, batch):
    x, pos, box = batch
    cls, reg = model(x)
    focal = F.binary_cross_entropy_with_logits(cls, pos.to(cls.dtype), reduction="sum")
    l1 = (F.smooth_l1_loss(reg, box.to(reg.dtype), reduction="none").sum(-1) * pos).sum()
    return (focal + l1) / pos.sum().clamp(min=1), pos.sum()

manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=10, epochs=2))
model = Detector()
manager.fit(model, TensorDataset(images, positive, boxes), loss_fn=loss_fn, optimizer=torch.optim.SGD(model.parameters(), 0.01))
""",
    "segmentation_with_ignored_pixels": """
torch.manual_seed(0)
images = torch.randn(54, 1, 8, 8)
masks = torch.where(torch.rand(54, 8, 8) < 0.3, 255, (images[:, 0] > 0).long())

def loss_fn(model, batch):
    x, y = batch
    known = (y != 255).sum()
    return F.cross_entropy(model(x), y, ignore_index=255), known, {"known": (known, y.numel())}

model = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 2, 1))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(model, TensorDataset(images, masks), loss_fn=loss_fn, optimizer=torch.optim.Adam(model.parameters(), 1e-2))
""",
    "translation_with_weight": """
from multi_gpu_training.training.loss import token_cross_entropy
torch.manual_seed(1)
source = [torch.randint(2, 14, (n,)) for n in torch.randint(2, 8, (75,)).tolist()]

def collate(rows):
    ids = F.pad(nn.utils.rnn.pad_sequence(rows, batch_first=True), (0, 8))[:, :8]
    return {"src": ids, "labels": torch.where(ids == 0, -100, ids)}

class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(14, 8, padding_idx=0)
        self.enc, self.dec = nn.GRU(8, 12, batch_first=True), nn.GRU(8, 12, batch_first=True)
        self.out = nn.Linear(12, 14)
    def forward(self, src):
        _, h = self.enc(self.emb(src))
        return self.out(self.dec(self.emb(F.pad(src[:, :-1], (1, 0), value=1)), h)[0])

def loss_fn(model, batch):
    return token_cross_entropy(model(batch["src"]), batch["labels"])

manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
model = Seq2Seq()
manager.fit(model, DataLoader(source, batch_size=12, shuffle=True, collate_fn=collate), loss_fn=loss_fn, optimizer=torch.optim.Adam(model.parameters(), 5e-3))
""",
    "transformer_from_a_dict": """
config = {"width": 16, "heads": 2, "layers": 2, "words": 30, "length": 10}

class Tagger(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.words, self.places = nn.Embedding(c["words"], c["width"]), nn.Parameter(torch.randn(c["length"], c["width"]) / 10)
        layer = nn.TransformerEncoderLayer(c["width"], c["heads"], 32, dropout=0.1, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, c["layers"], enable_nested_tensor=False)
        self.out = nn.Linear(c["width"], 2)
    def forward(self, ids):
        h = self.body(self.words(ids) + self.places, src_key_padding_mask=ids == 0)
        keep = (ids != 0)[..., None]
        return self.out((h * keep).sum(1) / keep.sum(1))

torch.manual_seed(0)
ids = torch.randint(1, 30, (72, 10))
for row, n in enumerate(torch.randint(3, 11, (72,)).tolist()):
    ids[row, n:] = 0
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2, warmup_steps=3, schedule="cosine", max_grad_norm=1.0))
model = Tagger(config)
manager.fit(model, TensorDataset(ids, (ids.sum(1) > 90).long()), optimizer=torch.optim.AdamW(model.parameters(), 3e-3))
""",
    "generator_against_a_fixed_critic": """
torch.manual_seed(0)
critic = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)).requires_grad_(False)

def loss_fn(model, batch):
    (z,) = batch
    fake = model(z)
    return F.softplus(-critic.to(z.device, z.dtype)(fake)).mean() + 0.1 * fake.square().mean()

manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = net(out=4)
manager.fit(model, TensorDataset(points()[0]), loss_fn=loss_fn, optimizer=torch.optim.Adam(model.parameters(), 1e-2, betas=(0.5, 0.99)))
""",
    "distilled_from_a_seeded_teacher": """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
torch.manual_seed(99)
teacher = nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Dropout(0.3), nn.Linear(20, 3)).eval()

def loss_fn(model, batch):
    x, y = batch
    with torch.no_grad():
        soft = teacher.to(x.device, x.dtype)(x).div(2).softmax(1)
    logits = model(x)
    return 0.5 * F.cross_entropy(logits, y) + 2 * F.kl_div(F.log_softmax(logits / 2, 1), soft, reduction="batchmean")

model = net()
manager.fit(model, TensorDataset(*points()), loss_fn=loss_fn, optimizer=torch.optim.Adam(model.parameters(), 1e-2))
""",
    "contrast_with_a_fixed_bank": """
torch.manual_seed(3)
bank = F.normalize(torch.randn(20, 8), dim=1)

def loss_fn(model, batch):
    x, y = batch
    a, b = F.normalize(model(x), dim=1), F.normalize(model(x * 1.1), dim=1)
    logits = torch.cat([(a * b).sum(1, keepdim=True), a @ bank.to(a).T], 1) / 0.3
    return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long, device=x.device))

manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = net(out=8)
manager.fit(model, TensorDataset(*points()), loss_fn=loss_fn, optimizer=torch.optim.SGD(model.parameters(), 0.1))
""",
    "robust_regression_per_sample": """
def loss_fn(model, batch):
    x, y = batch
    error = (model(x) - y).abs().flatten()
    return torch.where(error < 0.5, error ** 2, error - 0.25).clamp(max=3).mean()

x, _ = points()
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=14, epochs=2, max_grad_value=0.05))
model = net(out=1)
manager.fit(model, TensorDataset(x, x[:, :1] ** 2), loss_fn=loss_fn, optimizer=torch.optim.RMSprop(model.parameters(), 1e-2))
""",
    "stream_with_shuffle_buffer": """
class Shuffled(IterableDataset):
    def __init__(self, source, size, seed):
        self.source, self.size, self.seed = source, size, seed
    def __iter__(self):
        rng, held = random.Random(self.seed), []
        for item in self.source:
            held.append(item)
            if len(held) == self.size:
                yield held.pop(rng.randrange(self.size))
        rng.shuffle(held)
        yield from held

manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = net()
manager.fit(model, Shuffled(list(zip(*points())), 20, 7), optimizer=torch.optim.SGD(model.parameters(), 0.1))
""",
    "shards_in_memory": """
x, y = points(96)
shards = {f"part{i}": list(zip(x[i::4], y[i::4])) for i in range(4)}
stream = ShardedStream(list(shards), open_shard=lambda name: iter(shards[name]), buffer=16)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = net()
manager.fit(model, stream, optimizer=torch.optim.Adam(model.parameters(), 1e-2))
""",
    "value_learning_with_target_network": """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=3))
q = net()
target = copy.deepcopy(q).requires_grad_(False)

def td(model, batch):
    s, a, r, after, done = batch
    with torch.no_grad():
        best = target.to(s.device, s.dtype)(after).amax(1)
    return F.smooth_l1_loss(model(s).gather(1, a[:, None])[:, 0], r + 0.9 * best * ~done)

class Renew(Callback):
    def on_step_end(self, run, result):
        if result.step % 3 == 0:
            target.load_state_dict(run.model.state_dict())

s, a = points()
data = TensorDataset(s, a, s[:, 0] * (a == 0), s.roll(1, 1), s[:, 2] > 1)
manager.fit(q, data, loss_fn=td, optimizer=torch.optim.SGD(q.parameters(), 0.1), callbacks=[Renew()])
""",
    "loss_closes_over_the_model": """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
network = net()
def loss_fn(_, batch):
    x, y = batch
    return F.cross_entropy(network(x), y)

manager.fit(network, TensorDataset(*points()), loss_fn=loss_fn, optimizer=torch.optim.SGD(network.parameters(), 0.1))
""",
    "agent_that_calls_its_own_model": """
class Agent:
    def __init__(self):
        self.model = net()
        self.calls = collections.Counter()
    def loss(self, model, batch):
        s, a, r = batch
        self.calls["loss"] += 1
        logp = F.log_softmax(self.model(s), 1)
        return -(logp.gather(1, a[:, None])[:, 0] * r).mean() + 0.01 * (logp.exp() * logp).sum(1).mean()

agent = Agent()
x, y = points()
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
manager.fit(agent.model, TensorDataset(x, y, x[:, 0]), loss_fn=agent.loss, optimizer=torch.optim.Adam(agent.model.parameters(), 1e-2))
manager.say(str(agent.calls))
""",
    "accumulation_shrinks_with_more_ranks": """
world = int(os.environ.get("WORLD_SIZE", 1))
config = MultiGPUConfig(global_batch_size=24, gradient_accumulation_steps=max(1, 4 // world), epochs=2, max_grad_norm=0.5)
manager = MultiGPUTrainingManager(config)
model = net()
manager.fit(model, TensorDataset(*points()), optimizer=torch.optim.SGD(model.parameters(), 0.3, momentum=0.9))
""",
    "own_share_of_a_global_batch_size": """
world = int(os.environ.get("WORLD_SIZE", 1))
manager = MultiGPUTrainingManager(MultiGPUConfig(batch_size=max(1, 12 // world), global_batch_size=12, epochs=2))
model = net()
manager.fit(model, TensorDataset(*points()), optimizer=torch.optim.SGD(model.parameters(), 0.1))
""",
    "counts_reduced_for_the_log": """
seen = torch.zeros(3)

class Count(Callback):
    def on_epoch_end(self, run, epoch, metrics):
        total = seen.clone()
        if dist.is_initialized():
            dist.all_reduce(total)
        run.say(f"classes seen: {total.tolist()}")

def loss_fn(model, batch):
    x, y = batch
    seen.add_(torch.bincount(y.cpu(), minlength=3))
    return F.cross_entropy(model(x), y)

manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = net()
manager.fit(model, TensorDataset(*points()), loss_fn=loss_fn, optimizer=torch.optim.SGD(model.parameters(), 0.1), callbacks=[Count()])
""",
    "each_rank_shows_another_sample": """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
x, y = points()
picker = random.Random(manager.placement.rank)
print("rank", manager.placement.rank, "example", x[picker.randrange(len(x))].tolist()[:2])
model = net()
manager.fit(model, TensorDataset(x, y), optimizer=torch.optim.SGD(model.parameters(), 0.1))
""",
    "prepared_by_the_main_process_first": """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
cache = Path(tempfile.gettempdir()) / f"prepared_{os.getppid()}.npz"
with manager.main_process_first():
    if not cache.exists():
        x, y = points()
        np.savez(cache, x=((x - x.mean(0)) / x.std(0)).numpy(), y=y.numpy())
    stored = np.load(cache)
    x, y = torch.from_numpy(stored["x"]), torch.from_numpy(stored["y"])
model = net()
manager.fit(model, TensorDataset(x, y), optimizer=torch.optim.SGD(model.parameters(), 0.1))
""",
    "rows_read_from_a_memory_map": """
path = Path(tempfile.mkdtemp()) / "rows.npy"
np.save(path, points()[0].numpy())

class Rows(Dataset):
    def __init__(self):
        self.rows = np.load(path, mmap_mode="r")
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, i):
        row = torch.from_numpy(np.array(self.rows[i]))
        return {"x": row, "y": row[:2].prod()[None]}

manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = net(out=1)
manager.fit(model, Rows(), loss_fn=lambda model, b: F.mse_loss(model(b["x"]), b["y"]), optimizer=torch.optim.SGD(model.parameters(), 0.05))
""",
    "features_cached_by_index": """
class Cached(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y
        self.features = functools.lru_cache(maxsize=32)(self.compute)
    def compute(self, i):
        return torch.fft.rfft(self.x[i]).abs()
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        return self.features(i), self.y[i]

manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = net(width=4)
manager.fit(model, Cached(*points()), optimizer=torch.optim.SGD(model.parameters(), 0.05))
""",
    "plateau_with_validation_each_epoch": """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=32, epochs=4, scheduler_unit="epoch"))
model = net()
optimizer = torch.optim.SGD(model.parameters(), 0.5)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
manager.fit(model, TensorDataset(*points()), TensorDataset(*points(40, seed=4)), optimizer=optimizer, scheduler=scheduler)
""",
    "norms_and_histograms_on_the_main_rank": """
class Watch(Callback):
    def on_step_end(self, run, result):
        if run.placement.is_main and result.step % 2 == 0:
            with torch.no_grad():
                norms = {n: float(p.norm()) for n, p in run.model.named_parameters()}
                np.histogram(run.model[0].weight.detach().cpu().numpy(), bins=5)
            print(result.step, norms, result.grad_norm)

manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2, max_grad_norm=1.0))
model = net()
manager.fit(model, TensorDataset(*points()), optimizer=torch.optim.SGD(model.parameters(), 0.1), callbacks=[Watch()])
""",
    "groups_by_name_of_parameter": """
model = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 3))
groups = collections.defaultdict(list)
for name, p in model.named_parameters():
    groups[0.0 if p.ndim == 1 else 0.05].append(p)
optimizer = torch.optim.AdamW([{"params": ps, "weight_decay": wd} for wd, ps in groups.items()], lr=1e-2, betas=(0.9, 0.95))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
torch.manual_seed(0)
for p in model.parameters():
    if p.ndim > 1:
        nn.init.orthogonal_(p)
manager.fit(model, TensorDataset(*points()), optimizer=optimizer)
""",
    "variational_with_noise_of_augment": """
class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(6, 6), nn.Linear(3, 6)
    def forward(self, x, noise):
        mean, log_var = self.enc(x).chunk(2, 1)
        return self.dec(mean + noise * (log_var / 2).exp()), mean, log_var

def loss_fn(model, batch):
    x, noise = batch
    out, mean, log_var = model(x, noise)
    kl = -0.5 * (1 + log_var - mean ** 2 - log_var.exp()).sum(1)
    return ((out - x) ** 2).sum(1).mean() + 0.1 * kl.mean()

torch.manual_seed(0)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = VAE()
manager.fit(model, TensorDataset(points()[0]), loss_fn=loss_fn, augment=lambda batch, random: (*batch, random.normal(3)),
            optimizer=torch.optim.Adam(model.parameters(), 1e-2))
""",
    "packed_sequences": """
class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.rnn, self.out = nn.Embedding(20, 8, padding_idx=0), nn.LSTM(8, 6, batch_first=True, bidirectional=True), nn.Linear(12, 2)
    def forward(self, ids, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(self.words(ids), lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.out(self.rnn(packed)[1][0].transpose(0, 1).flatten(1))

def collate(rows):
    ids, labels = zip(*rows)
    return nn.utils.rnn.pad_sequence(ids, batch_first=True), torch.tensor([len(i) for i in ids]), torch.tensor(labels)

torch.manual_seed(0)
texts = [torch.randint(1, 20, (n,)) for n in torch.randint(3, 11, (64,)).tolist()]
rows = [(t, int(t.sum() > 60)) for t in texts]
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
model = Packed()
manager.fit(model, DataLoader(rows, batch_size=12, shuffle=True, collate_fn=collate), loss_fn=lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2]),
            optimizer=torch.optim.Adam(model.parameters(), 1e-2))
""",
    "split_with_a_seeded_generator": """
x, y = points(120)
train, val = random_split(ConcatDataset([TensorDataset(x[:70], y[:70]), TensorDataset(x[70:], y[70:])]), [95, 25],
                          generator=torch.Generator().manual_seed(1))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2, early_stopping_patience=3))
model = net()
manager.fit(model, train, val, optimizer=torch.optim.SGD(model.parameters(), 0.1))
""",
    "stops_at_a_loss_over_all_ranks": """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=10))
model = net()
model, loader, _ = manager.setup_training(model, TensorDataset(*points()), optimizer=torch.optim.SGD(model.parameters(), 0.5))
for epoch in range(10):
    metrics = manager.train_epoch(loader, epoch)
    if metrics["loss"] < 0.9 or manager.should_stop:
        break
manager.finish()
""",
    "losses_of_ranks_added_for_a_progress_bar": """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = net()
model, loader, _ = manager.setup_training(model, TensorDataset(*points()), optimizer=torch.optim.SGD(model.parameters(), 0.1))
for epoch in range(2):
    for batch in loader:
        result = manager.trainer.train_step(batch)
        if result.step % 2 == 0:
            mean = result.loss.detach().clone()
            if dist.is_initialized():
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
            manager.say(f"step {result.step}: about {float(mean):.4f}")
manager.finish()
""",
    "penalty_that_grows_with_the_step": """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = net()
strength = torch.zeros(())

class Grow(Callback):
    def on_step_end(self, run, result):
        strength.fill_(min(1.0, result.step / 6))

def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y) + strength.to(x) * 1e-2 * sum(p.square().sum() for p in model.parameters())

manager.fit(model, TensorDataset(*points()), loss_fn=loss_fn, optimizer=torch.optim.SGD(model.parameters(), 0.1), callbacks=[Grow()])
""",
    "steps_counted_in_a_buffer": """
class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
    def forward(self, x):
        if self.training:
            self.calls += 1
        return self.net(x) / (1 + 0.1 * (self.calls > 4))

manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = Counted()
manager.fit(model, TensorDataset(*points()), optimizer=torch.optim.SGD(model.parameters(), 0.1))
""",
    "bags_of_words": """
class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(25, 8, mode="mean", padding_idx=0), nn.Linear(8, 2)
    def forward(self, ids):
        return self.out(self.bag(ids))

torch.manual_seed(0)
ids = torch.randint(0, 25, (80, 7))
ids[:, 0] = ids[:, 0].clamp(min=1)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = Bags()
manager.fit(model, TensorDataset(ids, (ids.sum(1) > 84).long()), optimizer=torch.optim.Adagrad(model.parameters(), 0.1))
""",
    "messages_between_nodes": """
class Messages(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.mix, self.out = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 1)
    def forward(self, nodes, links):
        h = self.lift(nodes).relu()
        for _ in range(2):
            h = h + self.mix(links @ h / links.sum(-1, keepdim=True).clamp(min=1)).tanh()
        return self.out(h.mean(1))

torch.manual_seed(0)
nodes, links = torch.randn(66, 5, 3), (torch.rand(66, 5, 5) < 0.4).float()
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
model = Messages()
manager.fit(model, TensorDataset(nodes, links, links.sum((1, 2))[:, None] / 5), loss_fn=nn.MSELoss(), optimizer=torch.optim.Adam(model.parameters(), 1e-2))
""",
    "forecast_with_teacher_forcing_by_sample": """
class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(1, 8), nn.Linear(8, 1)
    def forward(self, x, force):
        h, value, outs = x.new_zeros(len(x), 8), x[:, 0], []
        for t in range(x.shape[1] - 1):
            h = self.cell(value, h)
            guess = self.out(h)
            outs.append(guess)
            value = torch.where(force[:, t:t + 1], x[:, t + 1], guess)
        return torch.stack(outs, 1)

torch.manual_seed(0)
series, force = torch.randn(60, 6, 1).cumsum(1), torch.rand(60, 5) < 0.5
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
model = Forecast()
manager.fit(model, TensorDataset(series, force), loss_fn=lambda m, b: F.mse_loss(m(*b), b[0][:, 1:]), optimizer=torch.optim.Adam(model.parameters(), 1e-2))
""",
    "named_tuples_as_samples": """
Sample = collections.namedtuple("Sample", "x y importance")

class Named(Dataset):
    def __init__(self):
        self.x, self.y = points()
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        return Sample(self.x[i], self.y[i], 1.0 + float(self.y[i] == 2))

def loss_fn(model, batch):
    each = F.cross_entropy(model(batch.x), batch.y, reduction="none") * batch.importance
    return each.sum() / batch.importance.sum(), batch.importance.sum()

manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = net()
manager.fit(model, Named(), loss_fn=loss_fn, optimizer=torch.optim.SGD(model.parameters(), 0.1))
""",
    "random_restart_seeded_by_step": """
class Restart(Callback):
    '''Reinitialises the unit with the smallest weights, alike on every rank.'''
    def on_step_end(self, run, result):
        if result.step % 3 == 0:
            with torch.no_grad():
                layer = run.model[0]
                unit = int(layer.weight.norm(dim=1).argmin())
                draw = torch.randn(layer.weight.shape[1], generator=torch.Generator().manual_seed(result.step))
                layer.weight[unit] = draw.to(layer.weight) / 3

manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = net()
manager.fit(model, TensorDataset(*points()), optimizer=torch.optim.SGD(model.parameters(), 0.1), callbacks=[Restart()])
""",
    "synchronised_normalisation_and_tied_rates": """
torch.manual_seed(0)
images, labels = torch.randn(64, 1, 8, 8), torch.randint(0, 4, (64,))
model = nn.Sequential(nn.Conv2d(1, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 10), nn.BatchNorm1d(10), nn.Linear(10, 4))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2, sync_bn=True, ema_decay=0.9))
manager.fit(model, TensorDataset(images, labels), TensorDataset(images[:20], labels[:20]), optimizer=torch.optim.SGD(model.parameters(), 0.05, nesterov=True, momentum=0.9))
""",
    "margin_from_class_counts_of_all_labels": """
x, y = points()
counts = torch.bincount(y, minlength=3).float()
margins = 0.5 / counts.pow(0.25)

class LDAM(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("margins", margins)
    def forward(self, output, target):
        shifted = output - F.one_hot(target, 3) * self.margins.to(output)
        return F.cross_entropy(4 * shifted, target)

manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = net()
manager.fit(model, TensorDataset(x, y), loss_fn=LDAM(), optimizer=torch.optim.SGD(model.parameters(), 0.05))
""",
    "rows_of_the_global_batch_shared": """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, max_steps=10))
states, actions = points(200)
memory = random.Random(9)

def loss_fn(model, batch):
    s, a, r = batch
    return F.smooth_l1_loss(model(s).gather(1, a[:, None])[:, 0], r)

model = net()
model, *_ = manager.setup_training(model, loss_fn=loss_fn, optimizer=torch.optim.Adam(model.parameters(), 1e-2))
for step in range(manager.step, 10):
    rows = torch.tensor(memory.sample(range(200), 16))
    manager.trainer.train_step(manager.shard((states[rows], actions[rows], states[rows, 0])))
manager.finish()
""",
    "dead_batch_guard_that_never_fires": """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
model = net()
model, loader, _ = manager.setup_training(model, TensorDataset(*points()), optimizer=torch.optim.SGD(model.parameters(), 0.1))
skipped = 0
for epoch in range(2):
    for x, y in loader:
        if not torch.isfinite(x).all():
            skipped += 1
            continue
        manager.trainer.train_step((x, y))
manager.say(f"skipped {skipped}")
manager.finish()
""",
}
