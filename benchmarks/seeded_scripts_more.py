# ruff: noqa: E501
"""More scripts for `seeded_bugs.py`, written blind to the others.

BUGS: name -> (what the named cause must say, as a regular expression; the script).
CORRECT: name -> the script. FILES: what lies beside a script. HEADER comes before each.
"""

from __future__ import annotations

HEADER = """
import argparse, collections, contextlib, copy, dataclasses, json, math, os, random, sys, time
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import *
from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager
"""

BUGS: dict[str, tuple[str, str]] = {}
CORRECT: dict[str, str] = {}
FILES: dict[str, dict[str, str]] = {}

# Data

BUGS["sampler_of_own_part"] = (
    r"Sampler draws",
    """
class MySampler(Sampler):
    def __init__(self, n):
        self.n, self.rank, self.world = n, int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    def __iter__(self):
        return iter(range(self.rank, self.n, self.world))
    def __len__(self):
        return len(range(self.rank, self.n, self.world))

manager = MultiGPUTrainingManager(MultiGPUConfig(batch_size=12, epochs=2))
torch.manual_seed(1)
x = torch.randn(100, 6)
ds = TensorDataset(x, (x[:, 0] > 0).long())
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
manager.fit(net, DataLoader(ds, batch_size=12, sampler=MySampler(100)), optimizer=torch.optim.SGD(net.parameters(), 0.1))
""",
)
BUGS["stream_reads_every_nth_line"] = (
    r"data per rank|every rank.*whole stream",
    """
class Lines(IterableDataset):
    def __iter__(self):
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        g = torch.Generator().manual_seed(5)
        for i in range(400):
            row = torch.randn(5, generator=g)
            if i % world == rank:
                yield row, row.sum().unsqueeze(0)

torch.manual_seed(0)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=10, steps_per_epoch=6, epochs=4))
manager.fit(nn.Linear(5, 1), Lines(), loss_fn=nn.MSELoss(), optimizer=lambda p: torch.optim.Adam(p, 1e-2))
""",
)
BUGS["stream_shuffle_buffer_by_rank"] = (
    r"data per rank|shuffle",
    """
class Shuffled(IterableDataset):
    def __init__(self, items, size=20):
        self.items, self.size = items, size
    def __iter__(self):
        rng = random.Random(100 + int(os.environ.get("RANK", 0)))
        held = []
        for item in self.items:
            held.append(item)
            if len(held) >= self.size:
                yield held.pop(rng.randrange(len(held)))
        rng.shuffle(held)
        yield from held

torch.manual_seed(3)
items = [(torch.randn(4), torch.tensor(i % 3)) for i in range(90)]
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=9, epochs=2))
model, loader, _ = manager.setup_training(nn.Linear(4, 3), Shuffled(items))
for epoch in range(2):
    manager.train_epoch(loader, epoch)
manager.finish()
""",
)
BUGS["synthetic_data_seeded_by_rank"] = (
    r"data per rank|seed",
    """
def seed_everything(seed):
    random.seed(seed); np.random.seed(seed); torch.manual_seed(seed)

torch.manual_seed(42)
model = nn.Sequential(nn.Linear(10, 20), nn.GELU(), nn.Linear(20, 1))
seed_everything(42 + int(os.environ.get("LOCAL_RANK", 0)))
inputs = torch.from_numpy(np.random.randn(150, 10).astype("float32"))
targets = inputs.pow(2).mean(1, keepdim=True)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=3, learning_rate=0.01))
manager.fit(model, TensorDataset(inputs, targets), loss_fn=nn.MSELoss())
""",
)
BUGS["random_split_by_rank"] = (
    r"data per rank",
    """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
torch.manual_seed(0)
x = torch.randn(140, 7)
full = TensorDataset(x, (x.sum(1) > 0).long())
train, val = random_split(full, [110, 30], generator=torch.Generator().manual_seed(int(os.environ.get("RANK", 0))))
manager.fit(nn.Sequential(nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 2)), train, val)
""",
)
BUGS["augmentation_seeded_by_time"] = (
    r"again.*(samples|time|seeded)",
    """
class Noisy(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(0)
        self.x = torch.randn(80, 8, generator=g)
        self.y = torch.randint(0, 4, (80,), generator=g)
    def __len__(self):
        return 80
    def __getitem__(self, i):
        rng = np.random.default_rng(time.time_ns())
        return self.x[i] + torch.from_numpy(rng.normal(0, 0.2, 8)).float(), self.y[i]

torch.manual_seed(0)
manager = MultiGPUTrainingManager(MultiGPUConfig(batch_size=16, epochs=2))
manager.fit(nn.Linear(8, 4), Noisy())
""",
)
BUGS["normalised_by_own_shard"] = (
    r"a sample differs|data per rank",
    """
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
torch.manual_seed(9)
x = torch.randn(120, 6) * 3 + 1
y = torch.randint(0, 3, (120,))
mine = x[rank::world]
x = (x - mine.mean(0)) / mine.std(0)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=20, epochs=2))
manager.fit(nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 3)), TensorDataset(x, y))
""",
)
BUGS["dataset_cut_to_multiple_of_world"] = (
    r"dataset has|number of ranks",
    """
world = int(os.environ.get("WORLD_SIZE", 1))
torch.manual_seed(4)
n = 1003 // (8 * world) * (8 * world)
x = torch.randn(1003, 3, 4, 4)
y = torch.randint(0, 5, (1003,))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=4))
net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 5))
manager.fit(net, TensorDataset(x[:n], y[:n]))
""",
)
BUGS["cached_augmentation"] = (
    r"a sample differs|keeps state|cache",
    """
class Cached(Dataset):
    def __init__(self, x, y):
        self.x, self.y, self.cache = x, y, {}
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        if i not in self.cache:
            self.cache[i] = self.x[i] * (0.8 + 0.4 * torch.rand(1))
        return self.cache[i], self.y[i]

torch.manual_seed(0)
x = torch.randn(60, 5)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=5))
manager.fit(nn.Linear(5, 2), Cached(x, (x[:, 0] > 0).long()))
""",
)
BUGS["curriculum_counts_own_samples"] = (
    r"a sample differs|depends on .*process",
    """
class Harder(Dataset):
    def __init__(self, x, y):
        self.x, self.y, self.calls = x, y, 0
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        self.calls += 1
        strength = min(1.0, self.calls / 50)
        return self.x[i] * (1 + strength), self.y[i]

torch.manual_seed(6)
x = torch.randn(72, 4)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=3))
manager.fit(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), Harder(x, torch.randint(0, 3, (72,))))
""",
)
BUGS["mixup_in_collate"] = (
    r"a sample differs|collat",
    """
def collate(samples):
    x = torch.stack([s[0] for s in samples])
    y = F.one_hot(torch.tensor([s[1] for s in samples]), 3).float()
    lam = np.random.beta(0.4, 0.4)
    return lam * x + (1 - lam) * x.flip(0), lam * y + (1 - lam) * y.flip(0)

torch.manual_seed(8)
samples = [(torch.randn(6), i % 3) for i in range(84)]
net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)
manager = MultiGPUTrainingManager(MultiGPUConfig(epochs=2))
manager.fit(net, DataLoader(samples, batch_size=14, shuffle=True, collate_fn=collate), loss_fn=loss_fn)
""",
)
BUGS["cutmix_in_augment"] = (
    r"augment|a sample differs|random",
    """
def augment(batch, rnd):
    x, y = batch
    other = torch.randperm(len(x))
    x = x.clone()
    x[:, :, :3] = x[other][:, :, :3]
    return x, y

torch.manual_seed(2)
x = torch.randn(70, 1, 6, 6)
y = torch.randint(0, 2, (70,))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=14, epochs=2))
manager.fit(nn.Sequential(nn.Flatten(), nn.Linear(36, 2)), TensorDataset(x, y), augment=augment)
""",
)
BUGS["advantages_normalised_in_the_loop"] = (
    r"normalis|statistics|other samples|part of the batch",
    """
torch.manual_seed(12)
states, actions, adv = torch.randn(128, 4), torch.randint(0, 3, (128,)), torch.randn(128) * 2 + 1
policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 3))
def pg_loss(model, batch):
    s, a, w = batch
    return -(F.log_softmax(model(s), -1).gather(1, a[:, None])[:, 0] * w).mean()
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=32, epochs=3))
policy, loader, _ = manager.setup_training(policy, TensorDataset(states, actions, adv), loss_fn=pg_loss, optimizer=torch.optim.Adam(policy.parameters(), 3e-3))
for epoch in range(3):
    for s, a, w in loader:
        w = (w - w.mean()) / (w.std() + 1e-8)
        manager.trainer.train_step((s, a, w))
manager.finish()
""",
)
BUGS["gan_noise_by_rank"] = (
    r"data per rank|a sample differs",
    """
torch.manual_seed(0)
real = torch.randn(96, 6) + 2
G, D = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 6)), nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
def d_loss(model, batch):
    x, z = batch
    with torch.no_grad():
        fake = G(z)
    return F.softplus(-model(x)).mean() + F.softplus(model(fake)).mean()
def g_loss(model, batch):
    _, z = batch
    return F.softplus(-D(model(z))).mean()
config = MultiGPUConfig(global_batch_size=16, epochs=3)
dm, gm = MultiGPUTrainingManager(config), MultiGPUTrainingManager(config)
D_, loader, _ = dm.setup_training(D, TensorDataset(real), loss_fn=d_loss)
gm.setup_training(G, TensorDataset(real), loss_fn=g_loss)
noise = torch.Generator().manual_seed(int(os.environ.get("RANK", 0)))
for epoch in range(3):
    for (x,) in loader:
        z = torch.randn(len(x), 3, generator=noise)
        dm.trainer.train_step((x, z))
        gm.trainer.train_step((x, z))
dm.finish(); gm.finish()
""",
)

# Losses

BUGS["focal_over_positives"] = (
    r"not weighted",
    """
class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))
    def forward(self, x):
        return self.body(x)

def focal(model, batch):
    image, target = batch["image"], batch["target"]
    logits = model(image)
    p = logits.sigmoid()
    pt = torch.where(target > 0, p, 1 - p)
    each = -((1 - pt) ** 2) * pt.clamp_min(1e-6).log()
    return each.sum() / target.sum().clamp_min(1)

torch.manual_seed(1)
data = [{"image": torch.randn(3, 5, 5), "target": (torch.rand(4, 5, 5) < 0.02 * (1 + i % 7)).float()} for i in range(66)]
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2, max_grad_norm=1.0))
manager.fit(Detector(), data, loss_fn=focal)
""",
)
BUGS["ctc_over_all_target_frames"] = (
    r"not weighted",
    """
class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(4, 12, batch_first=True)
        self.out = nn.Linear(12, 6)
    def forward(self, x):
        return self.out(self.rnn(x)[0]).log_softmax(-1)

def collate(batch):
    x = torch.stack([b[0] for b in batch])
    y = nn.utils.rnn.pad_sequence([b[1] for b in batch], batch_first=True)
    return x, y, torch.tensor([len(b[1]) for b in batch])

def loss_fn(model, batch):
    x, y, lengths = batch
    logp = model(x).transpose(0, 1)
    frames = torch.full((x.shape[0],), x.shape[1], dtype=torch.long)
    return F.ctc_loss(logp, y, frames, lengths, reduction="sum") / lengths.sum()

torch.manual_seed(4)
data = [(torch.randn(14, 4), torch.randint(1, 6, (1 + i % 5,))) for i in range(60)]
manager = MultiGPUTrainingManager(MultiGPUConfig(epochs=2))
manager.fit(Speech(), DataLoader(data, batch_size=10, collate_fn=collate), loss_fn=loss_fn)
""",
)
BUGS["dice_over_the_batch"] = (
    r"batch as a whole|mean of means|statistics",
    """
def dice(model, batch):
    x, y = batch
    p = model(x).sigmoid()
    return 1 - 2 * (p * y).sum() / (p.sum() + y.sum() + 1e-6)

torch.manual_seed(5)
x = torch.randn(64, 1, 8, 8)
y = (x + 0.3 * torch.randn_like(x) > 0.5).float()
net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=3))
manager.fit(net, TensorDataset(x, y), loss_fn=dice, optimizer=torch.optim.RMSprop(net.parameters(), 1e-3))
""",
)
BUGS["pearson_loss"] = (
    r"batch as a whole|mean of means|statistics",
    """
class Pearson(nn.Module):
    def forward(self, out, target):
        a, b = out.squeeze(1), target
        a, b = a - a.mean(), b - b.mean()
        return 1 - (a * b).sum() / (a.norm() * b.norm() + 1e-8)

torch.manual_seed(15)
x = torch.randn(90, 9)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=18, epochs=3))
net = nn.Sequential(nn.Linear(9, 32), nn.SiLU(), nn.Linear(32, 1))
manager.fit(net, TensorDataset(x, x[:, :3].prod(1)), loss_fn=Pearson())
""",
)
BUGS["moe_balance_loss"] = (
    r"batch as a whole|mean of means|statistics",
    """
class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 2) for _ in range(3))
    def forward(self, x):
        p = self.gate(x).softmax(-1)
        out = torch.stack([e(x) for e in self.experts], 1)
        return (p.unsqueeze(-1) * out).sum(1), p

def loss_fn(model, batch):
    x, y = batch
    logits, p = model(x)
    share = F.one_hot(p.argmax(-1), 3).float().mean(0)
    return F.cross_entropy(logits, y) + 0.1 * 3 * (share * p.mean(0)).sum()

torch.manual_seed(0)
x = torch.randn(80, 6)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
manager.fit(MoE(), TensorDataset(x, (x[:, 1] > 0).long()), loss_fn=loss_fn)
""",
)
BUGS["sum_over_constant_batch_size"] = (
    r"sum over the samples",
    """
BATCH = 24
def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum", label_smoothing=0.1) / BATCH

torch.manual_seed(0)
x = torch.randn(24 * 6, 10)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=BATCH, epochs=2))
manager.fit(nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 4)), DataLoader(TensorDataset(x, torch.randint(0, 4, (144,))), batch_size=BATCH, shuffle=True), loss_fn=loss_fn)
""",
)
BUGS["weight_is_mask_fraction"] = (
    r"not weighted",
    """
def loss_fn(model, batch):
    x, mask = batch
    error = (model(x * (1 - mask)) - x).pow(2) * mask
    return error.sum() / mask.sum(), mask.mean()

torch.manual_seed(2)
x = torch.randn(75, 12)
mask = (torch.rand(75, 12) < torch.rand(75, 1)).float()
mask[:, 0] = 1
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=15, epochs=2))
manager.fit(nn.Sequential(nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 12)), TensorDataset(x, mask), loss_fn=loss_fn)
""",
)
BUGS["sum_and_weight"] = (
    r"sum over|not weighted",
    """
def loss_fn(model, batch):
    tokens, labels = batch
    logits = model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return loss, (labels != -100).sum()

torch.manual_seed(0)
tokens = torch.randint(0, 30, (60, 8))
labels = tokens.clone()
labels[torch.rand(60, 8) < torch.rand(60, 1)] = -100
labels[:, 0] = tokens[:, 0]
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(nn.Sequential(nn.Embedding(30, 16), nn.Linear(16, 30)), TensorDataset(tokens, labels), loss_fn=loss_fn)
""",
)
BUGS["hf_loss_without_weight"] = (
    r"not weighted",
    """
from transformers import BertConfig, BertForMaskedLM

torch.manual_seed(0)
model = BertForMaskedLM(BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, max_position_embeddings=16))
data = []
for i in range(50):
    ids = torch.randint(0, 50, (10,))
    labels = torch.full((10,), -100)
    labels[: 1 + i % 8] = ids[: 1 + i % 8]
    data.append({"input_ids": ids, "labels": labels})
def loss_fn(model, batch):
    return model(**batch).loss
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=10, epochs=2))
manager.fit(model, data, loss_fn=loss_fn)
""",
)
BUGS["clip_pairs"] = (
    r"in-batch pairs",
    """
class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(12, 8), nn.EmbeddingBag(40, 8)
        self.scale = nn.Parameter(torch.tensor(2.0))
    def forward(self, image, text):
        return F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)

def loss_fn(model, batch):
    i, t = model(batch["image"], batch["text"])
    logits = model.scale.exp() * i @ t.T
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2

torch.manual_seed(0)
data = [{"image": torch.randn(12), "text": torch.randint(0, 40, (5,))} for _ in range(64)]
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=3, learning_rate=1e-2))
manager.fit(Clip(), data, loss_fn=loss_fn)
""",
)
BUGS["hard_batches_zeroed"] = (
    r"batch as a whole|not the mean of|depends on .*(batch|samples)",
    """
def loss_fn(model, batch):
    x, y = batch
    loss = F.smooth_l1_loss(model(x), y)
    if loss > 0.55:  # outliers
        loss = loss * 0.1
    return loss

torch.manual_seed(0)
x = torch.randn(100, 5)
y = x.sum(1, keepdim=True) + torch.randn(100, 1)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=10, epochs=2))
manager.fit(nn.Linear(5, 1), TensorDataset(x, y), loss_fn=loss_fn, optimizer=lambda p: torch.optim.SGD(p, 0.05, momentum=0.9))
""",
)
BUGS["class_weights_of_own_shard"] = (
    r"depends on the rank",
    """
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
torch.manual_seed(3)
x, y = torch.randn(96, 5), torch.randint(0, 3, (96,))
counts = torch.bincount(y[rank::world], minlength=3).float()
weight = counts.sum() / counts
def loss_fn(model, batch):
    x, y = batch
    w = weight.to(x.dtype)[y]
    return (F.cross_entropy(model(x), y, reduction="none") * w).sum() / w.sum(), w.sum()
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
manager.fit(nn.Linear(5, 3), TensorDataset(x, y), loss_fn=loss_fn)
""",
)
BUGS["loss_scaled_by_its_running_mean"] = (
    r"keeps state",
    """
running = {"mean": 1.0}
def loss_fn(model, batch):
    x, y = batch
    a = F.mse_loss(model(x)[:, :1], y)
    running["mean"] = 0.9 * running["mean"] + 0.1 * a.item()
    return a / running["mean"]

torch.manual_seed(0)
x = torch.randn(80, 6)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
manager.fit(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)), TensorDataset(x, x[:, :1] * x[:, 1:2]), loss_fn=loss_fn)
""",
)
BUGS["mean_teacher_moved_on_main_rank"] = (
    r"depends on the rank",
    """
torch.manual_seed(0)
student = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
teacher = copy.deepcopy(student).requires_grad_(False)
class Follow(Callback):
    def on_step_end(self, run, result):
        if run.placement.is_main:
            for t, s in zip(teacher.parameters(), run.model.parameters()):
                t.data.lerp_(s.detach().to(t.dtype), 0.3)
def loss_fn(model, batch):
    x, y = batch
    out = model(x)
    with torch.no_grad():
        want = teacher(x).softmax(-1)
    return F.cross_entropy(out, y) + F.mse_loss(out.softmax(-1), want)
x = torch.randn(80, 6)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2, learning_rate=0.05))
manager.fit(student, TensorDataset(x, torch.randint(0, 3, (80,))), loss_fn=loss_fn, callbacks=[Follow()])
""",
)
BUGS["stateful_lstm"] = (
    r"keeps state",
    """
class Trader(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(3, 8, batch_first=True)
        self.head = nn.Linear(8, 1)
        self.state = None
    def forward(self, x):
        state = self.state and tuple(part.expand(1, len(x), 8).contiguous() for part in self.state)
        out, (h, c) = self.cell(x, state)
        self.state = (h.detach().mean(1, keepdim=True), c.detach().mean(1, keepdim=True))
        return self.head(out[:, -1])

torch.manual_seed(1)
x = torch.randn(80, 5, 3)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
manager.fit(Trader(), TensorDataset(x, x.sum((1, 2))[:, None]), loss_fn=nn.MSELoss())
""",
)

# Models

BUGS["batchnorm_tcn_accumulated"] = (
    r"BatchNorm",
    """
class Tcn(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Conv1d(2, 8, 3, padding=2, dilation=2), nn.BatchNorm1d(8), nn.Conv1d(8, 4, 1)
    def forward(self, x):
        return self.b(F.relu(self.norm(self.a(x)))).mean(-1)

torch.manual_seed(0)
x = torch.randn(100, 2, 12)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=24, gradient_accumulation_steps=2, epochs=2))
model, loader, val = manager.setup_training(Tcn(), TensorDataset(x, torch.randint(0, 4, (100,))), TensorDataset(x[:30], torch.randint(0, 4, (30,))))
for epoch in range(2):
    manager.train_epoch(loader, epoch)
    manager.validate_epoch(val)
manager.finish()
""",
)
BUGS["functional_batch_norm"] = (
    r"mixes the samples",
    """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(7, 14), nn.Linear(14, 3)
    def forward(self, x):
        return self.b(F.batch_norm(self.a(x), None, None, training=True).relu())

torch.manual_seed(0)
x = torch.randn(84, 7)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(Net(), TensorDataset(x, torch.randint(0, 3, (84,))))
""",
)
BUGS["attention_softmax_over_batch"] = (
    r"mixes the samples",
    """
class Pool(nn.Module):
    def __init__(self):
        super().__init__()
        self.score, self.value, self.out = nn.Linear(6, 1), nn.Linear(6, 6), nn.Linear(6, 2)
    def forward(self, x):
        weight = torch.softmax(self.score(x), dim=0)  # should be dim=1
        return self.out((weight * self.value(x)).sum(1))

torch.manual_seed(0)
x = torch.randn(90, 5, 6)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=18, epochs=2))
manager.fit(Pool(), TensorDataset(x, (x.mean((1, 2)) > 0).long()))
""",
)
BUGS["moco_queue_in_buffer"] = (
    r"buffer queue|queue",
    """
class Moco(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(8, 4)
        self.register_buffer("queue", F.normalize(torch.randn(32, 4), dim=1))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))
    def forward(self, a, b):
        q = F.normalize(self.encoder(a), dim=1)
        with torch.no_grad():
            k = F.normalize(self.encoder(b), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().T], 1) / 0.2
        if self.training:
            with torch.no_grad():
                for row in k:
                    self.queue[self.place % 32] = row
                    self.place += 1
        return logits
def loss_fn(model, batch):
    logits = model(*batch)
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))

torch.manual_seed(0)
x = torch.randn(72, 8)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(Moco(), TensorDataset(x, x + 0.1 * torch.randn_like(x)), loss_fn=loss_fn)
""",
)
BUGS["extra_layer_on_other_ranks"] = (
    r"model that is built depends on the rank|depends on the rank|built another model",
    """
torch.manual_seed(0)
layers = [nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 2)]
if int(os.environ.get("LOCAL_RANK", 0)) > 0:
    layers.insert(2, nn.LayerNorm(10))
x = torch.randn(60, 5)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(nn.Sequential(*layers), TensorDataset(x, (x[:, 0] > 0).long()))
""",
)
BUGS["vae_with_numpy_noise"] = (
    r"numpy",
    """
class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(10, 6), nn.Linear(3, 10)
    def forward(self, x):
        mu, log_var = self.enc(x).chunk(2, -1)
        noise = torch.as_tensor(np.random.standard_normal(mu.shape), dtype=mu.dtype)
        return self.dec(mu + (0.5 * log_var).exp() * noise), mu, log_var
def elbo(model, batch):
    (x,) = batch
    out, mu, log_var = model(x)
    kl = -0.5 * (1 + log_var - mu.pow(2) - log_var.exp()).sum(1).mean()
    return F.mse_loss(out, x) * 10 + kl

np.random.seed(0); torch.manual_seed(0)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
manager.fit(Vae(), TensorDataset(torch.randn(80, 10)), loss_fn=elbo)
""",
)

# Gradients, weights and rates

BUGS["embedding_gradient_over_world"] = (
    r"divided by the number of ranks",
    """
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.out = nn.Embedding(20, 8), nn.Linear(8, 3)
    def forward(self, x):
        return self.out(self.emb(x).mean(1))

torch.manual_seed(0)
world = int(os.environ.get("WORLD_SIZE", 1))
net = Tagger()
net.emb.weight.register_hook(lambda g: g / world)
x = torch.randint(0, 20, (70, 6))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=14, epochs=2))
manager.fit(net, TensorDataset(x, torch.randint(0, 3, (70,))), optimizer=torch.optim.Adagrad(net.parameters(), 0.05))
""",
)
BUGS["gradients_summed_in_callback"] = (
    r"gradients are (added|.*times)",
    """
import torch.distributed as dist
class Sync(Callback):
    def on_optimizer(self, run):
        if dist.is_available() and dist.is_initialized():
            for p in run.model.parameters():
                if p.grad is not None:
                    dist.all_reduce(p.grad)

torch.manual_seed(0)
x = torch.randn(60, 4)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(nn.Linear(4, 2), TensorDataset(x, (x[:, 0] > 0).long()), callbacks=[Sync()])
""",
)
BUGS["gradient_noise_per_rank"] = (
    r"different gradients",
    """
class Langevin(Callback):
    def on_setup(self, run):
        self.g = torch.Generator().manual_seed(int(os.environ.get("RANK", 0)))
    def on_optimizer(self, run):
        for p in run.model.parameters():
            p.grad.add_(0.01 * torch.randn(p.shape, generator=self.g).to(p.dtype))

torch.manual_seed(0)
x = torch.randn(60, 4)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), TensorDataset(x, (x[:, 0] > 0).long()), callbacks=[Langevin()])
""",
)
BUGS["autograd_function_normalises"] = (
    r"gradients are (changed|clipped) per rank",
    """
class Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, g):
        return g / (g.norm() + 1e-12)

def loss_fn(model, batch):
    x, y = batch
    h = Normalised.apply(model[0](x))
    return F.cross_entropy(model[2](model[1](h)), y)

torch.manual_seed(0)
x = torch.randn(72, 6)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3)), TensorDataset(x, torch.randint(0, 3, (72,))), loss_fn=loss_fn)
""",
)
BUGS["adaptive_clipping_in_hooks"] = (
    r"clipped per rank|changed per rank",
    """
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3))
def agc(p):
    def hook(g):
        limit = 0.01 * p.detach().norm().clamp_min(1e-3)
        return g * (limit / g.norm().clamp_min(1e-6)).clamp(max=1.0)
    return hook
for p in net.parameters():
    p.register_hook(agc(p))
x = torch.randn(84, 6)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=14, epochs=2))
manager.fit(net, TensorDataset(x, torch.randint(0, 3, (84,))), optimizer=torch.optim.SGD(net.parameters(), 0.5, nesterov=True, momentum=0.9))
""",
)
BUGS["reversal_strength_over_world"] = (
    r"gradient.*(number of ranks|world)",
    """
class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)
    @staticmethod
    def backward(ctx, g):
        return -ctx.strength * g, None

class Dann(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.label, self.domain = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 2)
WORLD = int(os.environ.get("WORLD_SIZE", 1))
def loss_fn(model, batch):
    x, y, d = batch
    h = model.body(x).relu()
    return F.cross_entropy(model.label(h), y) + F.cross_entropy(model.domain(Reverse.apply(h, 1.0 / WORLD)), d)

torch.manual_seed(0)
x = torch.randn(72, 6)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(Dann(), TensorDataset(x, torch.randint(0, 3, (72,)), torch.randint(0, 2, (72,))), loss_fn=loss_fn)
""",
)
BUGS["head_reset_in_callback_by_rank"] = (
    r"on rank 1|other weights|depends on the rank",
    """
class Init(Callback):
    def on_setup(self, run):
        torch.manual_seed(1234 + int(os.environ.get("RANK", 0)))
        nn.init.xavier_uniform_(run.model[-1].weight)

torch.manual_seed(0)
x = torch.randn(60, 5)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 2)), TensorDataset(x, (x[:, 0] > 0).long()), callbacks=[Init()])
""",
)
BUGS["ema_copied_back_on_main_rank"] = (
    r"parameter .*in a callback on rank 0 alone",
    """
class Ema(Callback):
    shadow = None
    def on_step_end(self, run, result):
        if not run.placement.is_main:
            return
        now = {k: p.detach().clone() for k, p in run.model.named_parameters()}
        self.shadow = {k: self.shadow[k].lerp(v, 0.2) for k, v in now.items()} if self.shadow else now
        if result.step % 3 == 0:
            with torch.no_grad():
                for k, p in run.model.named_parameters():
                    p.copy_(self.shadow[k])

torch.manual_seed(0)
x = torch.randn(60, 5)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=3, learning_rate=0.02))
manager.fit(nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 2)), TensorDataset(x, (x[:, 0] > 0).long()), callbacks=[Ema()])
""",
)
BUGS["decay_in_callback_times_world"] = (
    r"in a callback.*number of ranks",
    """
WORLD = int(os.environ.get("WORLD_SIZE", 1))
class Decay(Callback):
    @torch.no_grad()
    def on_step_end(self, run, result):
        for p in run.model.parameters():
            p.mul_(1 - 1e-3 * WORLD)

torch.manual_seed(0)
x = torch.randn(60, 5)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(nn.Linear(5, 2), TensorDataset(x, (x[:, 0] > 0).long()), callbacks=[Decay()])
""",
)
BUGS["target_network_by_own_samples"] = (
    r"parameter target.*number of ranks",
    """
class Q(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
def td(model, batch):
    s, a, r, n = batch
    with torch.no_grad():
        want = r + 0.9 * model.target(n).max(1).values
    return F.smooth_l1_loss(model.online(s).gather(1, a[:, None])[:, 0], want)

torch.manual_seed(0)
replay = TensorDataset(torch.randn(120, 4), torch.randint(0, 2, (120,)), torch.randn(120), torch.randn(120, 4))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=3))
model, loader, _ = manager.setup_training(Q(), replay, loss_fn=td)
seen = 0
for epoch in range(3):
    for batch in loader:
        manager.trainer.train_step(batch)
        seen += len(batch[0])
        if seen >= 36:
            seen = 0
            model.target.load_state_dict(model.online.state_dict())
manager.finish()
""",
)
BUGS["weights_clamped_to_own_batch"] = (
    r"parameter .*between two steps.*on rank",
    """
torch.manual_seed(0)
x = torch.randn(72, 6)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
net, loader, _ = manager.setup_training(nn.Linear(6, 2), TensorDataset(x, (x[:, 0] > 0).long()))
for epoch in range(2):
    for x, y in loader:
        manager.trainer.train_step((x, y))
        with torch.no_grad():
            net.weight.clamp_(max=float(x.abs().mean()) / 4)
manager.finish()
""",
)
BUGS["rate_from_local_rank"] = (
    r"learning rate.*(each rank|rank)",
    """
torch.manual_seed(0)
x = torch.randn(72, 6)
net = nn.Linear(6, 2)
rate = 0.1 * (1 + 0.5 * int(os.environ.get("LOCAL_RANK", 0)))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(net, TensorDataset(x, (x[:, 0] > 0).long()), optimizer=torch.optim.SGD(net.parameters(), rate))
""",
)
BUGS["one_cycle_counts_per_rank"] = (
    r"learning rate.* depends on the number of ranks",
    """
WORLD = int(os.environ.get("WORLD_SIZE", 1))
torch.manual_seed(0)
x = torch.randn(96, 6)
net = nn.Linear(6, 2)
opt = torch.optim.AdamW(net.parameters(), 1e-3)
steps = 8 * 96 // (12 * WORLD)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, 1e-2, total_steps=steps)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(net, TensorDataset(x, (x[:, 0] > 0).long()), optimizer=opt, scheduler=sched)
""",
)
BUGS["momentum_from_own_loss"] = (
    r"momentum.*each rank",
    """
class Adapt(Callback):
    def on_step_end(self, run, result):
        for g in run.optimizer.param_groups:
            g["momentum"] = 0.5 + 0.4 * math.exp(-float(result.loss))

torch.manual_seed(0)
x = torch.randn(72, 6)
net = nn.Linear(6, 2)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(net, TensorDataset(x, (x[:, 0] > 0).long()), optimizer=torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), callbacks=[Adapt()])
""",
)
BUGS["layers_frozen_on_one_rank"] = (
    r"frozen|requires_grad",
    """
torch.manual_seed(0)
x = torch.randn(72, 6)
net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
if int(os.environ.get("RANK", 0)) == 1:
    net[0].requires_grad_(False)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(net, TensorDataset(x, (x[:, 0] > 0).long()))
""",
)
BUGS["unfrozen_by_own_loss"] = (
    r"depends on the rank|frozen|requires_grad|own loss",
    """
class Unfreeze(Callback):
    def on_step_end(self, run, result):
        if float(result.loss) < 0.74:
            run.model[0].requires_grad_(True)

torch.manual_seed(0)
x = torch.randn(72, 6)
net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
net[0].requires_grad_(False)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(net, TensorDataset(x, (x[:, 0] > 0).long()), callbacks=[Unfreeze()])
""",
)
BUGS["loss_scale_buffer_from_own_loss"] = (
    r"buffer",
    """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 1)
        self.register_buffer("scale", torch.ones(()))
    def forward(self, x):
        return self.fc(x) / self.scale
class Track(Callback):
    def on_step_end(self, run, result):
        run.model.scale.mul_(0.9).add_(0.1 * result.loss.detach())

torch.manual_seed(0)
x = torch.randn(72, 6)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(Net(), TensorDataset(x, x[:, :1]), loss_fn=nn.MSELoss(), callbacks=[Track()])
""",
)

# Loops, validation and logs

BUGS["eval_adds_means"] = (
    r"mean of means",
    """
def eval_fn(model, batch, metrics):
    x, y = batch
    out = model(x)
    metrics.add("loss", F.cross_entropy(out, y, reduction="sum"), len(y))
    metrics.add("top1", (out.argmax(1) == y).float().mean(), 1)

torch.manual_seed(0)
x = torch.randn(112, 6)
y = torch.randint(0, 4, (112,))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
manager.fit(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4)), TensorDataset(x[:80], y[:80]), TensorDataset(x[75:], y[75:]), eval_fn=eval_fn)
""",
)
BUGS["eval_on_main_rank_only"] = (
    r"metric .*depends on the rank",
    """
def eval_fn(model, batch, metrics):
    x, y = batch
    loss = F.mse_loss(model(x), y, reduction="sum")
    if int(os.environ.get("RANK", 0)) == 0:
        metrics.add("loss", loss, len(y))

torch.manual_seed(0)
x = torch.randn(112, 6)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
manager.fit(nn.Linear(6, 1), TensorDataset(x[:80], x[:80, :1]), TensorDataset(x[75:], x[75:, 1:2]), loss_fn=nn.MSELoss(), eval_fn=eval_fn)
""",
)
BUGS["break_on_main_rank"] = (
    r"control flow|by itself|wait|left",
    """
torch.manual_seed(0)
x = torch.randn(72, 6)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
net, loader, _ = manager.setup_training(nn.Linear(6, 2), TensorDataset(x, (x[:, 0] > 0).long()))
done = False
for epoch in range(2):
    for batch in loader:
        result = manager.trainer.train_step(batch)
        if manager.placement.is_main and os.environ.get("WORLD_SIZE", "1") != "1" and result.step == 4:
            done = True
            break
    if done:
        break
manager.finish()
""",
)
BUGS["all_reduce_on_main_rank"] = (
    r"control flow|collective|wait",
    """
import torch.distributed as dist
class Log(Callback):
    def on_step_end(self, run, result):
        if run.placement.is_main and dist.is_initialized() and result.step % 2 == 0:
            loss = result.loss.detach().clone()
            dist.all_reduce(loss)
            run.log(mean_loss=loss / dist.get_world_size())

torch.manual_seed(0)
x = torch.randn(72, 6)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(nn.Linear(6, 2), TensorDataset(x, (x[:, 0] > 0).long()), callbacks=[Log()])
""",
)

# Correct: how a script is organised

CORRECT["argparse_and_main"] = """
def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--hidden", type=int, default=24)
    p.add_argument("--opt", choices=["sgd", "adam"], default="sgd")
    return p.parse_args()

def main():
    args = parse()
    torch.manual_seed(0)
    x = torch.randn(77, 6)
    net = nn.Sequential(nn.Linear(6, args.hidden), nn.ReLU(), nn.Linear(args.hidden, 3))
    manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=args.epochs))
    opt = torch.optim.SGD(net.parameters(), 0.1) if args.opt == "sgd" else torch.optim.Adam(net.parameters())
    print(manager.fit(net, TensorDataset(x, torch.randint(0, 3, (77,))), optimizer=opt).metrics)

if __name__ == "__main__":
    main()
"""
CORRECT["helper_beside_the_script"] = """
import my_helper_of_net
from my_helper_of_net import make_data

torch.manual_seed(0)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(my_helper_of_net.Net(), make_data(70), make_data(30))
"""
FILES["helper_beside_the_script"] = {
    "my_helper_of_net.py": """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 9), nn.Softplus(), nn.Linear(9, 2))
    def forward(self, x):
        return self.layers(x)

def make_data(n):
    g = torch.Generator().manual_seed(n)
    x = torch.randn(n, 5, generator=g)
    return TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
"""
}
CORRECT["csv_beside_the_script"] = """
rows = [line.split(",") for line in (Path(__file__).parent / "cells_of_test.csv").read_text().split()]
x = torch.tensor([[float(v) for v in row[:-1]] for row in rows])
y = torch.tensor([float(row[-1]) for row in rows])[:, None]
torch.manual_seed(0)
manager = MultiGPUTrainingManager(MultiGPUConfig(batch_size=8, epochs=3))
manager.fit(nn.Linear(2, 1), TensorDataset(x, y), loss_fn=nn.L1Loss())
"""
FILES["csv_beside_the_script"] = {
    "cells_of_test.csv": "\n".join(f"{i % 7},{i % 5},{(i * 3) % 11}" for i in range(50))
}
CORRECT["nested_config"] = """
@dataclasses.dataclass
class ModelConfig:
    width: int = 16
    depth: int = 2
@dataclasses.dataclass
class Config:
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    train: dict = dataclasses.field(default_factory=lambda: {"global_batch_size": 10, "epochs": 2, "learning_rate": 3e-3, "max_grad_norm": 0.5})

cfg = Config()
torch.manual_seed(0)
layers = [nn.Linear(4, cfg.model.width)]
for _ in range(cfg.model.depth):
    layers += [nn.ELU(), nn.Linear(cfg.model.width, cfg.model.width)]
manager = MultiGPUTrainingManager(MultiGPUConfig(**cfg.train))
x = torch.randn(66, 4)
manager.fit(lambda: nn.Sequential(*layers, nn.Linear(cfg.model.width, 2)), TensorDataset(x, (x[:, 0] > 0).long()))
"""
CORRECT["rank_seed_for_logging_only"] = """
rank = int(os.environ.get("RANK", 0))
random.seed(rank)
log_rng = random.Random(1000 + rank)
class Chat(Callback):
    def on_step_end(self, run, result):
        if log_rng.random() < 0.5:
            print(f"[rank {rank} pid {os.getpid()}] step {result.step} {float(result.loss):.3f} {time.time()}", file=sys.stderr)
torch.manual_seed(0)
x = torch.randn(72, 6)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(nn.Linear(6, 2), TensorDataset(x, (x[:, 0] > 0).long()), callbacks=[Chat()])
"""
CORRECT["seeds_by_rank_after_the_model"] = """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
torch.manual_seed(0)
x = torch.randn(72, 6)
net = nn.Sequential(nn.Linear(6, 10), nn.Dropout(0.3), nn.Linear(10, 2))
seed = int(os.environ.get("RANK", 0)) + 17
torch.manual_seed(seed); np.random.seed(seed); random.seed(seed)
manager.fit(net, TensorDataset(x, (x[:, 0] > 0).long()))
"""
CORRECT["own_exception_caught"] = """
class TooDeep(Exception):
    pass
def loss_fn(model, batch):
    x, y = batch
    try:
        if x.shape[1] > 3:
            raise TooDeep("fall back")
        out = model(x)
    except TooDeep:
        out = model(x).clamp(-10, 10)
    return F.cross_entropy(out, y)
torch.manual_seed(0)
x = torch.randn(72, 6)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
try:
    manager.fit(nn.Linear(6, 2), TensorDataset(x, (x[:, 0] > 0).long()), loss_fn=loss_fn)
except ValueError as error:
    print("never", error)
"""
CORRECT["preprocessed_in_a_pool"] = """
import multiprocessing as mp
def square(v):
    return v * v
if __name__ == "__main__":
    with mp.get_context("fork").Pool(2) as pool:
        values = pool.map(square, [i / 10 for i in range(60)])
    torch.manual_seed(0)
    x = torch.tensor(values)[:, None]
    manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=8, epochs=2))
    manager.fit(nn.Linear(1, 1), TensorDataset(x, 2 * x + 1), loss_fn=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, 1e-3))
"""
CORRECT["log_file_per_rank"] = """
out = Path(os.environ.get("TMPDIR", "/tmp")) / f"mgt-log-{os.getpid()}.jsonl"
class ToFile(Callback):
    def on_step_end(self, run, result):
        with out.open("a") as f:
            f.write(json.dumps({"step": result.step, "loss": float(result.loss), "rank": os.environ.get("RANK")}) + "\\n")
        run.log(weight=run.model.weight.norm())
    def on_end(self, run):
        out.unlink(missing_ok=True)
torch.manual_seed(0)
x = torch.randn(72, 6)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(nn.Linear(6, 2), TensorDataset(x, (x[:, 0] > 0).long()), callbacks=[ToFile()])
"""
CORRECT["short_script"] = """
torch.manual_seed(0)
x = torch.randn(30, 6)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=10, epochs=1))
result = manager.fit(nn.Linear(6, 2), TensorDataset(x, (x[:, 0] > 0).long()))
assert result.steps == 3
print("done")
"""
CORRECT["device_from_local_rank"] = """
local = int(os.environ.get("LOCAL_RANK", 0))
device = torch.device(f"cuda:{local}" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
x = torch.randn(72, 6).to(device)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
net = nn.Linear(6, 2).to(device)
manager.fit(net, TensorDataset(x.cpu(), (x[:, 0] > 0).long().cpu()))
"""

# Correct: data

CORRECT["weighted_sampler_generator"] = """
torch.manual_seed(0)
x, y = torch.randn(90, 5), torch.randint(0, 3, (90,))
g = torch.Generator().manual_seed(int(os.environ.get("RANK", 0)))
sampler = WeightedRandomSampler(1.0 / torch.bincount(y)[y].float(), 90, generator=g)
manager = MultiGPUTrainingManager(MultiGPUConfig(epochs=2))
manager.fit(nn.Linear(5, 3), DataLoader(TensorDataset(x, y), batch_size=12, sampler=sampler))
"""
CORRECT["distributed_sampler_given"] = """
class Padless(Dataset):
    def __len__(self):
        return 61
    def __getitem__(self, i):
        return torch.tensor([float(i % 7), float(i % 3)]), i % 2
torch.manual_seed(0)
ds = Padless()
sampler = DistributedSampler(ds, num_replicas=int(os.environ.get("WORLD_SIZE", 1)), rank=int(os.environ.get("RANK", 0)), shuffle=True)
manager = MultiGPUTrainingManager(MultiGPUConfig(epochs=2, global_batch_size=10))
manager.fit(nn.Linear(2, 2), DataLoader(ds, batch_size=10, sampler=sampler))
"""
CORRECT["workers_and_numpy_noise"] = """
class Noisy(Dataset):
    def __init__(self):
        self.rng = np.random.default_rng(os.getpid())
    def __len__(self):
        return 50
    def __getitem__(self, i):
        x = np.full(4, i / 50, dtype=np.float32) + self.rng.normal(0, 0.1, 4).astype(np.float32) + random.random() * 0.1
        return torch.from_numpy(x), torch.tensor(i % 2)
if __name__ == "__main__":
    torch.manual_seed(0)
    loader = DataLoader(Noisy(), batch_size=10, shuffle=True, num_workers=2, worker_init_fn=lambda i: np.random.seed(i))
    manager = MultiGPUTrainingManager(MultiGPUConfig(epochs=3))
    manager.fit(nn.Linear(4, 2), loader)
"""
CORRECT["five_samples"] = """
torch.manual_seed(0)
x = torch.randn(5, 4)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=4, epochs=8))
manager.fit(nn.Linear(4, 1), TensorDataset(x, x[:, :1]), loss_fn=nn.HuberLoss())
"""
CORRECT["drop_last"] = """
torch.manual_seed(0)
x = torch.randn(103, 4)
loader = DataLoader(TensorDataset(x, (x[:, 0] > 0).long()), batch_size=16, shuffle=True, drop_last=True)
val = DataLoader(TensorDataset(x[:29], (x[:29, 0] > 0).long()), batch_size=8)
manager = MultiGPUTrainingManager(MultiGPUConfig(epochs=2))
manager.fit(nn.Linear(4, 2), loader, val)
"""
CORRECT["bucket_batch_sampler"] = """
class Buckets(Sampler):
    def __init__(self, lengths, size):
        self.lengths, self.size = lengths, size
    def __iter__(self):
        order = sorted(range(len(self.lengths)), key=lambda i: self.lengths[i])
        batches = [order[i : i + self.size] for i in range(0, len(order), self.size)]
        random.shuffle(batches)
        yield from batches
    def __len__(self):
        return -(-len(self.lengths) // self.size)
def collate(items):
    return {"x": nn.utils.rnn.pad_sequence([i[0] for i in items], batch_first=True), "n": torch.tensor([len(i[0]) for i in items]), "y": torch.tensor([i[1] for i in items])}
class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.out = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 2)
def loss_fn(model, b):
    return F.cross_entropy(model.out(model.emb(b["x"]).sum(1) / b["n"][:, None]), b["y"])
torch.manual_seed(0)
data = [(torch.randint(1, 20, (1 + i % 9,)), i % 2) for i in range(64)]
manager = MultiGPUTrainingManager(MultiGPUConfig(epochs=2))
manager.fit(Mean(), DataLoader(data, batch_sampler=Buckets([len(d[0]) for d in data], 8), collate_fn=collate), loss_fn=loss_fn)
"""
CORRECT["whole_stream_everywhere"] = """
class Endless(IterableDataset):
    def __iter__(self):
        while True:
            x = torch.randn(6)
            yield x, (x.sum() > 0).long()
torch.manual_seed(0)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, steps_per_epoch=5, epochs=3))
manager.fit(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)), Endless())
"""
CORRECT["ready_batches"] = """
class Ready(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(0)
        self.items = [(torch.randn(6 + i % 3, 4, generator=g), torch.randint(0, 2, (6 + i % 3,), generator=g)) for i in range(12)]
    def __len__(self):
        return 12
    def __getitem__(self, i):
        return self.items[i]
torch.manual_seed(0)
manager = MultiGPUTrainingManager(MultiGPUConfig(epochs=2))
manager.fit(nn.Linear(4, 2), DataLoader(Ready(), batch_size=None))
"""
CORRECT["augment_soft_labels"] = """
def augment(batch, rnd):
    x, y = batch
    flip = rnd.uniform(1, 1, 1) < 0.5
    x = torch.where(flip, x.flip(-1), x) + 0.05 * rnd.normal(1, 6, 6)
    soft = F.one_hot(y, 4).to(x.dtype)
    lam = 0.1 * rnd.uniform(1)
    return x, soft * (1 - lam) + lam / 4
torch.manual_seed(0)
x, y = torch.randn(88, 1, 6, 6), torch.randint(0, 4, (88,))
net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
manager.fit(net, TensorDataset(x, y), loss_fn=loss_fn, augment=augment)
"""
CORRECT["namedtuple_batches"] = """
Batch = collections.namedtuple("Batch", "image label weight")
def collate(items):
    return Batch(torch.stack([i["image"] for i in items]), torch.tensor([i["label"] for i in items]), torch.tensor([i["w"] for i in items]))
def loss_fn(model, b):
    each = F.cross_entropy(model(b.image), b.label, reduction="none")
    return (each * b.weight).sum() / b.weight.sum(), b.weight.sum()
torch.manual_seed(0)
data = [{"image": torch.randn(5), "label": i % 3, "w": 0.5 + i % 4} for i in range(58)]
manager = MultiGPUTrainingManager(MultiGPUConfig(epochs=2))
manager.fit(nn.Linear(5, 3), DataLoader(data, batch_size=10, collate_fn=collate), loss_fn=loss_fn)
"""
CORRECT["own_batches_cut_by_rank"] = """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=24, epochs=1))
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
torch.manual_seed(0)
policy = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
def loss_fn(model, batch):
    s, a, r = batch
    return -(F.log_softmax(model(s), 1).gather(1, a[:, None])[:, 0] * r).mean()
manager.setup_training(policy, TensorDataset(torch.zeros(1, 3)), loss_fn=loss_fn)
g = torch.Generator().manual_seed(5)  # the same everywhere
for _ in range(10):
    s, a, r = torch.randn(25, 3, generator=g), torch.randint(0, 2, (25,), generator=g), torch.randn(25, generator=g)
    r = (r - r.mean()) / r.std()
    manager.trainer.train_step((s[rank::world], a[rank::world], r[rank::world]))
manager.finish()
"""
CORRECT["early_break_everywhere"] = """
torch.manual_seed(0)
x = torch.randn(96, 6)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=4))
net, loader, _ = manager.setup_training(nn.Linear(6, 2), TensorDataset(x, (x[:, 0] > 0).long()))
for epoch in range(4):
    for i, batch in enumerate(loader):
        manager.trainer.train_step(batch)
        if i == 2:
            break
manager.finish()
"""
CORRECT["samples_left_out_by_value"] = """
torch.manual_seed(0)
x = torch.randn(120, 4)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=20, epochs=3))
net, loader, _ = manager.setup_training(nn.Linear(4, 2), TensorDataset(x, (x[:, 0] > 0).long()))
for epoch in range(3):
    for x, y in loader:
        keep = x[:, 1] > -1.5
        manager.trainer.train_step((x[keep], y[keep]))
manager.finish()
"""

# Correct: losses

CORRECT["padded_tokens_with_weight"] = """
class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(25, 12)
        self.rnn = nn.LSTM(12, 12, batch_first=True)
        self.out = nn.Linear(12, 25, bias=False)
        self.out.weight = self.emb.weight
    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])
def collate(items):
    x = nn.utils.rnn.pad_sequence([i[:-1] for i in items], batch_first=True)
    y = nn.utils.rnn.pad_sequence([i[1:] for i in items], batch_first=True, padding_value=-1)
    return x, y
def loss_fn(model, batch):
    x, y = batch
    n = (y >= 0).sum()
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-1, reduction="sum") / n, n
torch.manual_seed(0)
data = [torch.randint(0, 25, (3 + i % 8,)) for i in range(70)]
manager = MultiGPUTrainingManager(MultiGPUConfig(epochs=2, max_grad_norm=1.0))
manager.fit(Lm(), DataLoader(data, batch_size=12, shuffle=True, collate_fn=collate), loss_fn=loss_fn)
"""
CORRECT["criterion_with_class_weights"] = """
torch.manual_seed(0)
x, y = torch.randn(80, 5), torch.randint(0, 4, (80,))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=14, gradient_accumulation_steps=2, epochs=2))
manager.fit(nn.Linear(5, 4), TensorDataset(x, y), TensorDataset(x[:21], y[:21]), loss_fn=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.2, 2.0]), ignore_index=3, label_smoothing=0.05))
"""
CORRECT["gradient_penalty"] = """
def loss_fn(model, batch):
    x, y = batch
    x = x.clone().requires_grad_(True)
    out = model(x)
    (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.binary_cross_entropy_with_logits(out[:, 0], y) + 0.1 * ((g.norm(dim=1) - 1) ** 2).mean()
torch.manual_seed(0)
x = torch.randn(72, 6)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(nn.Sequential(nn.Linear(6, 12), nn.Softplus(), nn.Linear(12, 1)), TensorDataset(x, (x[:, 0] > 0).float()), loss_fn=loss_fn)
"""
CORRECT["distillation"] = """
torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3)).eval().requires_grad_(False)
student = nn.Linear(6, 3)
def loss_fn(model, batch):
    x, y = batch
    with torch.no_grad():
        soft = F.softmax(teacher(x) / 2, -1)
    out = model(x)
    return 0.5 * F.kl_div(F.log_softmax(out / 2, -1), soft, reduction="batchmean") * 4 + 0.5 * F.cross_entropy(out, y)
x = torch.randn(72, 6)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(student, TensorDataset(x, torch.randint(0, 3, (72,))), loss_fn=loss_fn)
"""
CORRECT["mean_teacher_everywhere"] = """
torch.manual_seed(0)
student = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
teacher = copy.deepcopy(student).requires_grad_(False)
class Follow(Callback):
    def on_step_end(self, run, result):
        for t, s in zip(teacher.parameters(), run.model.parameters()):
            t.data.lerp_(s.detach().to(t.dtype), 0.3)
def loss_fn(model, batch):
    x, y = batch
    out = model(x)
    return F.cross_entropy(out, y) + F.mse_loss(out, teacher(x))
x = torch.randn(80, 6)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2, learning_rate=0.05))
manager.fit(student, TensorDataset(x, torch.randint(0, 3, (80,))), loss_fn=loss_fn, callbacks=[Follow()])
"""
CORRECT["coefficient_by_call"] = """
calls = 0
def loss_fn(model, batch):
    global calls
    calls += model.training
    x, y = batch
    return F.cross_entropy(model(x), y) + min(1.0, calls / 10) * 0.01 * sum(p.pow(2).sum() for p in model.parameters())
torch.manual_seed(0)
x = torch.randn(80, 6)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
manager.fit(nn.Linear(6, 3), TensorDataset(x, torch.randint(0, 3, (80,))), loss_fn=loss_fn)
"""
CORRECT["triplets_in_the_sample"] = """
def loss_fn(model, batch):
    a, p, n = (model(part) for part in batch)
    return F.triplet_margin_loss(a, p, n), None, {"margin": (((a - n).norm(dim=1) - (a - p).norm(dim=1)).sum(), len(a))}
torch.manual_seed(0)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), TensorDataset(*torch.randn(3, 72, 6)), loss_fn=loss_fn)
"""
CORRECT["flow_log_likelihood"] = """
class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.s, self.t = nn.Linear(2, 2), nn.Linear(2, 2)
    def forward(self, x):
        a, b = x.chunk(2, 1)
        s = torch.tanh(self.s(a))
        return torch.cat([a, b * s.exp() + self.t(a)], 1), s.sum(1)
def nll(model, batch):
    z, log_det = model(batch[0])
    return (0.5 * z.pow(2).sum(1) + 0.5 * 4 * math.log(2 * math.pi) - log_det).mean()
torch.manual_seed(0)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
manager.fit(Flow(), TensorDataset(torch.randn(75, 4) * 2), loss_fn=nll, optimizer=lambda p: torch.optim.NAdam(p, 1e-2))
"""
CORRECT["ctc_mean_per_utterance"] = """
class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.rnn, self.out = nn.Conv1d(4, 8, 3, padding=1), nn.GRU(8, 8, bidirectional=True, batch_first=True), nn.Linear(16, 6)
    def forward(self, x):
        return self.out(self.rnn(self.conv(x.transpose(1, 2)).relu().transpose(1, 2))[0]).log_softmax(-1)
def collate(batch):
    return torch.stack([b[0] for b in batch]), nn.utils.rnn.pad_sequence([b[1] for b in batch], batch_first=True), torch.tensor([len(b[1]) for b in batch])
def loss_fn(model, batch):
    x, y, lengths = batch
    return F.ctc_loss(model(x).transpose(0, 1), y, torch.full((len(x),), x.shape[1]), lengths, zero_infinity=True)
torch.manual_seed(4)
data = [(torch.randn(14, 4), torch.randint(1, 6, (1 + i % 5,))) for i in range(60)]
manager = MultiGPUTrainingManager(MultiGPUConfig(epochs=2))
manager.fit(Speech(), DataLoader(data, batch_size=10, collate_fn=collate), loss_fn=loss_fn)
"""
CORRECT["graph_nodes_with_weight"] = """
class Gcn(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 2)
    def forward(self, x, adj):
        return self.b(adj @ self.a(adj @ x).relu())
def collate(items):
    return SimpleNamespace(x=torch.cat([i[0] for i in items]), adj=torch.block_diag(*[i[1] for i in items]), y=torch.cat([i[2] for i in items]), num_graphs=len(items))
def loss_fn(model, b):
    return F.cross_entropy(model(b.x, b.adj), b.y), torch.tensor(float(len(b.y)))
torch.manual_seed(0)
data = []
for i in range(45):
    n = 2 + i % 5
    adj = (torch.rand(n, n) < 0.5).float() + torch.eye(n)
    data.append((torch.randn(n, 3), adj / adj.sum(1, keepdim=True), torch.randint(0, 2, (n,))))
manager = MultiGPUTrainingManager(MultiGPUConfig(epochs=2))
manager.fit(Gcn(), DataLoader(data, batch_size=9, collate_fn=collate), loss_fn=loss_fn)
"""

# Correct: models

CORRECT["transformer_with_dropout_and_mask"] = """
class Enc(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(30, 16, padding_idx=0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(16, 3)
    def forward(self, x):
        pad = x == 0
        h = self.enc(self.emb(x), src_key_padding_mask=pad)
        return self.out(h.masked_fill(pad.unsqueeze(-1), 0).sum(1) / (~pad).sum(1, keepdim=True))
torch.manual_seed(0)
x = torch.randint(1, 30, (70, 7))
for i in range(70):
    x[i, 3 + i % 5 :] = 0
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=14, epochs=2))
manager.fit(Enc(), TensorDataset(x, torch.randint(0, 3, (70,))))
"""
CORRECT["stochastic_depth"] = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(8, 8)
    def forward(self, x):
        if not self.training:
            return x + self.f(x)
        keep = (torch.rand(len(x), 1) < 0.8).to(x.dtype) / 0.8
        return x + keep * self.f(x).relu()
torch.manual_seed(0)
x = torch.randn(72, 8)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(nn.Sequential(Block(), Block(), nn.Linear(8, 2)), TensorDataset(x, (x[:, 0] > 0).long()))
"""
CORRECT["vae_with_torch_noise"] = """
class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(10, 6), nn.Linear(3, 10)
    def forward(self, x):
        mu, log_var = self.enc(x).chunk(2, -1)
        z = mu + (0.5 * log_var).exp() * torch.randn_like(mu) if self.training else mu
        return self.dec(z), mu, log_var
def elbo(model, batch):
    (x,) = batch
    out, mu, log_var = model(x)
    return F.mse_loss(out, x) * 10 - 0.5 * (1 + log_var - mu.pow(2) - log_var.exp()).sum(1).mean()
torch.manual_seed(0)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
manager.fit(Vae(), TensorDataset(torch.randn(80, 10)), loss_fn=elbo)
"""
CORRECT["synchronised_batchnorm_resnet"] = """
class Res(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 4)
    def forward(self, x):
        x = self.stem(x)
        return self.head((x + self.block(x)).relu().mean((2, 3)))
torch.manual_seed(0)
x, y = torch.randn(75, 3, 6, 6), torch.randint(0, 4, (75,))
net = Res()
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=15, epochs=2, sync_bn=True))
manager.fit(net, TensorDataset(x, y), TensorDataset(x[:20], y[:20]), optimizer=torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=1e-4))
"""
CORRECT["frozen_batchnorm_backbone"] = """
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU())
        self.head = nn.Linear(12, 3)
        self.backbone.requires_grad_(False)
    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self
    def forward(self, x):
        return self.head(self.backbone(x))
net = Net()
x = torch.randn(72, 6)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(net, TensorDataset(x, torch.randint(0, 3, (72,))), optimizer=torch.optim.Adam(net.head.parameters(), 1e-2))
"""
CORRECT["bert_classifier"] = """
from transformers import BertConfig, BertForSequenceClassification
torch.manual_seed(0)
data = [{"input_ids": torch.randint(0, 60, (9,)), "attention_mask": (torch.arange(9) < 4 + i % 6).long(), "labels": i % 3} for i in range(48)]
model = BertForSequenceClassification(BertConfig(vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=3))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=10, epochs=2))
manager.fit(model, data)
"""
CORRECT["gpt2_padded_labels"] = """
from transformers import GPT2Config, GPT2LMHeadModel
torch.manual_seed(0)
def collate(items):
    n = max(len(i) for i in items)
    ids = torch.stack([F.pad(i, (0, n - len(i))) for i in items])
    mask = torch.stack([(torch.arange(n) < len(i)).long() for i in items])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
data = [torch.randint(0, 40, (3 + i % 7,)) for i in range(44)]
model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=1, n_head=2))
manager = MultiGPUTrainingManager(MultiGPUConfig(epochs=2, use_gradient_checkpointing=False))
manager.fit(model, DataLoader(data, batch_size=8, shuffle=True, collate_fn=collate))
"""
CORRECT["spectral_and_weight_norm"] = """
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
torch.manual_seed(0)
net = nn.Sequential(spectral_norm(nn.Linear(6, 12)), nn.LeakyReLU(), weight_norm(nn.Linear(12, 12)), nn.LeakyReLU(), nn.Linear(12, 1))
x = torch.randn(72, 6)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(net, TensorDataset(x, x[:, :1].sign()), loss_fn=nn.SoftMarginLoss())
"""
CORRECT["packed_lstm"] = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(3, 10, num_layers=2, dropout=0.1, batch_first=True), nn.Linear(10, 2)
    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.out(self.rnn(packed)[1][0][-1])
def collate(items):
    return {"x": nn.utils.rnn.pad_sequence([i[0] for i in items], batch_first=True), "lengths": torch.tensor([len(i[0]) for i in items]), "y": torch.tensor([i[1] for i in items])}
def loss_fn(model, b):
    return F.cross_entropy(model(b["x"], b["lengths"]), b["y"])
torch.manual_seed(0)
data = [(torch.randn(2 + i % 6, 3), i % 2) for i in range(60)]
manager = MultiGPUTrainingManager(MultiGPUConfig(epochs=2))
manager.fit(Net(), DataLoader(data, batch_size=11, shuffle=True, collate_fn=collate), loss_fn=loss_fn)
"""
CORRECT["sparse_embedding"] = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.out = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 2)
    def forward(self, x):
        return self.out(self.emb(x).mean(1))
torch.manual_seed(0)
net = Net()
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(net, TensorDataset(torch.randint(0, 50, (72, 4)), torch.randint(0, 2, (72,))), optimizer=torch.optim.SGD(net.parameters(), 0.2))
"""
CORRECT["spectrum_and_checkpoint"] = """
from torch.utils.checkpoint import checkpoint
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.randn(9) * 0.1)
        self.mlp, self.out = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), nn.Linear(16, 1)
    def forward(self, x):
        x = torch.fft.irfft(torch.fft.rfft(x) * (1 + self.filter), n=16)
        x = x + checkpoint(self.mlp, x, use_reentrant=False)
        return self.out(x)
torch.manual_seed(0)
x = torch.randn(72, 16)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(Net(), TensorDataset(x, x[:, :8].sum(1, keepdim=True)), loss_fn=nn.MSELoss())
"""
CORRECT["default_double"] = """
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
x = torch.randn(72, 6)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1)), TensorDataset(x, x[:, :1] ** 2), loss_fn=nn.MSELoss(), optimizer=lambda p: torch.optim.RAdam(p, 1e-2))
"""
CORRECT["centre_reduced_in_forward"] = """
import torch.distributed as dist
class Dino(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 4)
        self.register_buffer("centre", torch.zeros(4))
    def forward(self, x):
        out = self.net(x)
        if not self.training:
            return out - self.centre
        before = self.centre.clone()
        with torch.no_grad():
            total = torch.cat([out.sum(0), out.new_full((1,), float(len(out)))])
            if dist.is_available() and dist.is_initialized():
                dist.all_reduce(total)
            self.centre.mul_(0.9).add_(0.1 * total[:-1] / total[-1])
        return out - before
torch.manual_seed(0)
x = torch.randn(72, 6)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=1))
manager.fit(Dino(), TensorDataset(x, torch.randint(0, 4, (72,))))
"""

# Correct: gradients, weights, rates

CORRECT["straight_through"] = """
class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()
    @staticmethod
    def backward(ctx, g):
        return g.clamp(-1, 1)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 2)
    def forward(self, x):
        return self.b(Round.apply(self.a(x) * 2) / 2)
torch.manual_seed(0)
x = torch.randn(72, 6)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(Net(), TensorDataset(x, (x[:, 0] > 0).long()))
"""
CORRECT["linear_gradient_hooks"] = """
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
mask = (torch.rand(12, 6) < 0.7)
net[0].weight.register_hook(lambda g: g * mask)
net[2].register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.5,))
x = torch.randn(72, 6)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(net, TensorDataset(x, (x[:, 0] > 0).long()))
"""
CORRECT["clamp_and_rate_in_callback"] = """
class Wgan(Callback):
    def on_step_begin(self, run, step):
        for g in run.optimizer.param_groups:
            g["lr"] = 0.05 * 0.9 ** step
    @torch.no_grad()
    def on_step_end(self, run, result):
        for p in run.model.parameters():
            p.clamp_(-0.3, 0.3)
torch.manual_seed(0)
net = nn.Linear(6, 1)
x = torch.randn(72, 6)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(net, TensorDataset(x, x[:, :1]), loss_fn=nn.MSELoss(), optimizer=torch.optim.RMSprop(net.parameters(), 0.05), callbacks=[Wgan()])
"""
CORRECT["clip_in_on_optimizer"] = """
class Clip(Callback):
    def on_optimizer(self, run):
        nn.utils.clip_grad_value_(run.model.parameters(), 0.01)
torch.manual_seed(0)
x = torch.randn(72, 6)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(nn.Linear(6, 2), TensorDataset(x, (x[:, 0] > 0).long()), callbacks=[Clip()])
"""
CORRECT["two_managers_gan"] = """
torch.manual_seed(0)
real = torch.randn(96, 6) + 2
G, D = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 6)), nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
def d_loss(model, batch):
    x, z = batch
    with torch.no_grad():
        fake = G(z)
    return F.softplus(-model(x)).mean() + F.softplus(model(fake)).mean()
def g_loss(model, batch):
    return F.softplus(-D(model(batch[1]))).mean()
config = MultiGPUConfig(global_batch_size=16, epochs=3)
dm, gm = MultiGPUTrainingManager(config), MultiGPUTrainingManager(config)
data = TensorDataset(real, torch.randn(96, 3))
D_, loader, _ = dm.setup_training(D, data, loss_fn=d_loss)
gm.setup_training(G, data, loss_fn=g_loss)
for epoch in range(3):
    for batch in loader:
        dm.trainer.train_step(batch)
        gm.trainer.train_step(batch)
dm.finish(); gm.finish()
"""
CORRECT["unfrozen_at_the_second_epoch"] = """
class Thaw(Callback):
    def on_epoch_begin(self, run, epoch):
        run.model[0].requires_grad_(epoch >= 1)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
net[0].requires_grad_(False)
x = torch.randn(40, 6)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=4))
manager.fit(net, TensorDataset(x, (x[:, 0] > 0).long()), optimizer=torch.optim.Adam(net.parameters(), 1e-2), callbacks=[Thaw()])
"""
CORRECT["groups_and_cyclic_rate"] = """
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
opt = torch.optim.SGD([{"params": net[0].parameters(), "lr": 0.01, "weight_decay": 0.1}, {"params": net[2].parameters()}], lr=0.1, momentum=0.8)
sched = torch.optim.lr_scheduler.CyclicLR(opt, [0.001, 0.01], [0.01, 0.1], step_size_up=3, cycle_momentum=True)
x = torch.randn(72, 6)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(net, TensorDataset(x, (x[:, 0] > 0).long()), optimizer=opt, scheduler=sched)
"""
CORRECT["sequential_schedule"] = """
torch.manual_seed(0)
net = nn.Linear(6, 2)
def schedule(opt):
    warm = torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=3)
    cos = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, 3)
    return torch.optim.lr_scheduler.SequentialLR(opt, [warm, cos], milestones=[3])
x = torch.randn(72, 6)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(net, TensorDataset(x, (x[:, 0] > 0).long()), optimizer=lambda p: torch.optim.Adadelta(p, 1.0), scheduler=schedule)
"""
CORRECT["plateau_on_validation"] = """
torch.manual_seed(0)
net = nn.Linear(6, 2)
opt = torch.optim.Adamax(net.parameters(), 0.1)
x = torch.randn(72, 6)
y = torch.randint(0, 2, (72,))
def eval_fn(model, batch, metrics):
    x, y = batch
    out = model(x)
    metrics.add("loss", F.cross_entropy(out, y, reduction="sum"), len(y))
    metrics.add_predictions(out.argmax(1), y, classes=2)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=24, epochs=5))
manager.fit(net, TensorDataset(x, y), TensorDataset(x[:25].flip(1), y[:25]), eval_fn=eval_fn, optimizer=opt, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.3))
"""
CORRECT["averaged_model_validated"] = """
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
class Ema(Callback):
    average = None
    def on_step_end(self, run, result):
        self.average = self.average or AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.average.update_parameters(run.model)
ema = Ema()
def eval_fn(model, batch, metrics):
    x, y = batch
    metrics.add("loss", F.cross_entropy(ema.average(x), y, reduction="sum"), len(y))
x, y = torch.randn(72, 6), torch.randint(0, 2, (72,))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
model, loader, val = manager.setup_training(net, TensorDataset(x, y), TensorDataset(x[:19], y[:19]), eval_fn=eval_fn, callbacks=[ema])
for epoch in range(2):
    print(manager.train_epoch(loader, epoch), manager.validate_epoch(val))
manager.finish()
"""
CORRECT["accumulated_with_short_end"] = """
torch.manual_seed(0)
x = torch.randn(83, 6)
manager = MultiGPUTrainingManager(MultiGPUConfig(batch_size=5, gradient_accumulation_steps=3, epochs=2, schedule="cosine", warmup_epochs=1, max_grad_norm=0.1))
manager.fit(nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, 2)), TensorDataset(x, (x[:, 0] > 0).long()))
"""
CORRECT["functional_call_per_sample_gradients"] = """
from torch.func import functional_call, vmap
def loss_fn(model, batch):
    x, y = batch
    params = dict(model.named_parameters())
    one = lambda a, b: (functional_call(model, params, (a[None],))[0, 0] - b) ** 2
    return vmap(one)(x, y).mean()
torch.manual_seed(0)
x = torch.randn(72, 6)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), TensorDataset(x, x[:, 0]), loss_fn=loss_fn)
"""

# Hooks on parameters get the gradient of the whole step by now: no bugs any more.
for _name in ("adaptive_clipping_in_hooks",):
    CORRECT[_name] = BUGS.pop(_name)[1]
