# ruff: noqa: E501
"""Complete small scripts for `seeded_bugs.py`, written from the documentation alone.

As in the other files: BUGS maps a name to what the cause must say and to the script, CORRECT a name to the script.
"""

from __future__ import annotations

HEADER = """
import argparse, collections, copy, dataclasses, functools, itertools, json, math, os, random, time
from pathlib import Path
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import *
from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager
"""

DATA = r"data per rank|a sample (differs|looks)|generator|(not those|other|not the) (that one rank sees|samples)"
BUFFER = r"buffer .*(not synchronised|follows)"
WHOLE = r"over the batch as a whole|in-batch pairs|mixes the samples"
UNWEIGHTED = r"not weighted"
FEED = r"(skips|other|not the same|own) .*(batch|data)|data per rank|place in the data|steps"

BUGS: dict[str, tuple[str, str]] = {
    # --- data ---
    "vocabulary_of_own_texts": (
        DATA,
        """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
rank, world = manager.placement.dp_rank, manager.placement.dp_size
words = "red green blue dog cat fish runs sleeps eats fast slow now".split()
rng = random.Random(4)
texts = [[rng.choice(words) for _ in range(6)] for _ in range(90)]
labels = [int("dog" in t) + int("fast" in t) for t in texts]

# every rank only has to read its own part of the corpus
counts = collections.Counter(w for t in texts[rank::world] for w in t)
vocabulary = {w: i for i, (w, _) in enumerate(counts.most_common())}
ids = torch.tensor([[vocabulary.get(w, 0) for w in t] for t in texts])

class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.EmbeddingBag(20, 12)
        self.out = nn.Linear(12, 3)
    def forward(self, x):
        return self.out(torch.tanh(self.words(x)))

class Texts(Dataset):
    def __len__(self):
        return len(ids)
    def __getitem__(self, i):
        return ids[i], torch.tensor(labels[i])

torch.manual_seed(0)
manager.fit(Bag(), Texts(), optimizer=lambda p: torch.optim.Adam(p, lr=0.01))
""",
    ),
    "scaled_by_some_unseeded_rows": (
        DATA + r"|not seeded|another result when it is run again",
        """
torch.manual_seed(1)
raw = torch.randn(120, 6) * torch.arange(1, 7) + 3
target = raw.sum(1, keepdim=True) / 10
some = np.random.default_rng().choice(120, 40, replace=False)  # enough for mean and deviation
mean, std = raw[some].mean(0), raw[some].std(0)

class Rows(Dataset):
    def __len__(self):
        return 120
    def __getitem__(self, i):
        return (raw[i] - mean) / std, target[i]

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=24, epochs=3, learning_rate=0.01))
manager.fit(model, Rows())
""",
    ),
    "collate_scales_by_the_loudest": (
        r"collat|scaled|normalis|data per rank|part of the batch",
        """
class Clips(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(3)
        self.waves = torch.randn(80, 1, 64, generator=g) * torch.rand(80, 1, 1, generator=g)
        self.labels = torch.randint(0, 4, (80,), generator=g)
    def __len__(self):
        return 80
    def __getitem__(self, i):
        return self.waves[i], self.labels[i]

def collate(samples):
    waves = torch.stack([w for w, _ in samples])
    return waves / waves.abs().max(), torch.stack([y for _, y in samples])

torch.manual_seed(0)
model = nn.Sequential(nn.Conv1d(1, 8, 9, stride=4), nn.GELU(), nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(32, 4))
loader = DataLoader(Clips(), batch_size=20, shuffle=True, collate_fn=collate)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=20, epochs=2))
manager.fit(model, loader, optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3))
""",
    ),
    "buckets_shuffled_by_rank": (
        r"(?i)(batch )?sampler|different (orders|batches)|" + DATA,
        """
import torch.distributed as dist
manager = MultiGPUTrainingManager(MultiGPUConfig(epochs=3))
rng = random.Random(dist.get_rank() if dist.is_initialized() else 0)
lengths = [3 + (7 * i) % 9 for i in range(72)]
torch.manual_seed(2)
rows = [torch.randn(n, 4) for n in lengths]
labels = torch.tensor([int(r.sum() > 0) for r in rows])

class Buckets(Sampler):
    def __iter__(self):
        order = sorted(range(72), key=lambda i: lengths[i])
        batches = [order[i : i + 12] for i in range(0, 72, 12)]
        rng.shuffle(batches)
        yield from batches
    def __len__(self):
        return 6

class Rows(Dataset):
    def __len__(self):
        return 72
    def __getitem__(self, i):
        return rows[i], labels[i]

def collate(samples):
    return nn.utils.rnn.pad_sequence([r for r, _ in samples], batch_first=True), torch.stack([y for _, y in samples])

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.out = nn.Linear(4, 16), nn.Linear(16, 2)
    def forward(self, x):
        mask = (x != 0).any(-1, keepdim=True)
        return self.out((torch.relu(self.first(x)) * mask).sum(1) / mask.sum(1))

model = Net()
manager.fit(model, DataLoader(Rows(), batch_sampler=Buckets(), collate_fn=collate), optimizer=torch.optim.Adam(model.parameters(), lr=0.01))
""",
    ),
    "windows_from_one_generator_of_the_module": (
        DATA,
        """
text = np.random.default_rng(7).integers(0, 20, 4000)
draw = np.random.default_rng(8)

class Windows(Dataset):
    def __len__(self):
        return 128
    def __getitem__(self, i):
        start = draw.integers(0, len(text) - 13)
        piece = torch.from_numpy(text[start : start + 13])
        return piece[:-1], piece[1:]

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(20, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 20)
    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])

def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

torch.manual_seed(0)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, max_steps=12, max_grad_norm=1.0))
manager.fit(Model(), Windows(), loss_fn=loss_fn)
""",
    ),
    "examples_shown_before_the_split": (
        DATA,
        """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
torch.manual_seed(11)
x = torch.rand(150, 1, 6, 6)
y = (x.mean((1, 2, 3)) * 20).long() % 3

class Images(Dataset):
    def __init__(self, keep):
        self.keep = keep
    def __len__(self):
        return len(self.keep)
    def __getitem__(self, i):
        return x[self.keep[i]], y[self.keep[i]]

if manager.placement.is_main:
    for i in torch.randint(0, 150, (3,)).tolist():
        print("example", i, "mean", x[i].mean().item(), "class", y[i].item())

order = torch.randperm(150).tolist()
train, val = Images(order[:120]), Images(order[120:])
model = nn.Sequential(nn.Flatten(), nn.Linear(36, 24), nn.ReLU(), nn.Linear(24, 3))
manager.fit(model, train, val, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
""",
    ),
    "classes_numbered_by_a_set": (
        DATA,
        """
names = ["sparrow", "robin", "wren", "owl", "heron", "swift"]
g = torch.Generator().manual_seed(0)
files = [(names[int(i)], torch.randn(10, generator=g) + int(i)) for i in torch.randint(0, 6, (96,), generator=g)]
number = {name: i for i, name in enumerate({name for name, _ in files})}

class Birds(Dataset):
    def __len__(self):
        return len(files)
    def __getitem__(self, i):
        name, features = files[i]
        return features, number[name]

def main():
    torch.manual_seed(0)
    manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=24, epochs=3, learning_rate=5e-3))
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 6))
    manager.fit(model, Birds())

if __name__ == "__main__":
    main()
""",
    ),
    "pseudo_labels_only_on_main": (
        DATA,
        """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=20, epochs=2))
torch.manual_seed(0)
unlabelled = torch.randn(100, 5)
teacher = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 3)).eval()
labels = torch.zeros(100, dtype=torch.long)
if manager.placement.is_main:  # the teacher is expensive: once is enough
    with torch.no_grad():
        labels = teacher(unlabelled).argmax(1)

class Pseudo(Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, i):
        return unlabelled[i], labels[i]

torch.manual_seed(1)
student = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
manager.fit(student, Pseudo(), optimizer=lambda p: torch.optim.Adam(p, lr=0.01))
""",
    ),
    # --- the model ---
    "projection_kept_as_a_plain_tensor": (
        r"depends on the rank|not seeded|generator",
        """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=30, epochs=2))
torch.manual_seed(1000 + manager.placement.dp_rank)  # other dropout on every rank

class Fourier(nn.Module):
    def __init__(self):
        super().__init__()
        self.frequencies = torch.randn(2, 16)
        self.net = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 1))
    def forward(self, x):
        waves = 2 * math.pi * x @ self.frequencies
        return self.net(torch.cat([waves.sin(), waves.cos()], -1))

model = Fourier()
grid = torch.stack(torch.meshgrid(torch.linspace(0, 1, 12), torch.linspace(0, 1, 12), indexing="ij"), -1).reshape(-1, 2)
values = (grid[:, :1] * 6).sin() * grid[:, 1:]
manager.fit(model, TensorDataset(grid, values), optimizer=torch.optim.Adam(model.parameters(), lr=1e-3))
""",
    ),
    "centre_set_by_the_first_batch": (
        r"buffer|depends on the rank|mixes the samples|keeps state",
        """
class OneClass(nn.Module):
    "Deep SVDD: pull every feature towards the centre of the first batch."
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16, bias=False), nn.LeakyReLU(), nn.Linear(16, 4, bias=False))
        self.centre = None
    def forward(self, x):
        z = self.net(x)
        if self.centre is None:
            self.centre = z.detach().mean(0)
        return (z - self.centre).square().sum(1)

torch.manual_seed(0)
data = torch.randn(100, 8)
model = OneClass()
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=20, epochs=2))
manager.fit(model, TensorDataset(data), loss_fn=lambda model, batch: model(batch[0]).mean(), optimizer=torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4))
""",
    ),
    "teacher_left_in_training_mode": (
        r"BatchNorm",
        """
def net(width):
    return nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))

torch.manual_seed(0)
teacher, student = net(32), nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
x, y = torch.randn(110, 6), torch.randint(0, 3, (110,))

def distil(model, batch):
    x, y = batch
    with torch.no_grad():
        soft = F.softmax(teacher(x) / 2, 1)
    logits = model(x)
    return 0.5 * F.cross_entropy(logits, y) + 0.5 * F.kl_div(F.log_softmax(logits / 2, 1), soft, reduction="batchmean")

manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=22, epochs=2, learning_rate=0.01))
manager.fit(student, TensorDataset(x, y), loss_fn=distil)
""",
    ),
    "accumulation_from_the_world_under_sync_bn": (
        r"BatchNorm|accumulation",
        """
manager = MultiGPUTrainingManager()
world = manager.placement.dp_size
config = MultiGPUConfig(batch_size=4, gradient_accumulation_steps=24 // (4 * world), epochs=2, sync_bn=True)
manager = MultiGPUTrainingManager(config)
torch.manual_seed(0)
x = torch.randn(96, 3, 8, 8)
y = (x[:, 0].mean((1, 2)) > 0).long()
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
manager.fit(model, TensorDataset(x, y), optimizer=torch.optim.SGD(model.parameters(), lr=0.05))
""",
    ),
    "features_whitened_by_the_batch": (
        WHOLE,
        """
class Whiten(nn.Module):
    def forward(self, z):
        z = z - z.mean(0)
        cov = z.T @ z / len(z) + 0.1 * torch.eye(z.shape[1], dtype=z.dtype, device=z.device)
        return torch.linalg.solve_triangular(torch.linalg.cholesky(cov), z.T, upper=False).T

torch.manual_seed(3)
x = torch.randn(120, 9)
y = x[:, :2].prod(1, keepdim=True)
model = nn.Sequential(nn.Linear(9, 5), Whiten(), nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 1))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=40, epochs=3))
manager.fit(model, TensorDataset(x, y), loss_fn=nn.SmoothL1Loss())
""",
    ),
    "temperature_by_samples_seen": (
        BUFFER,
        """
class Annealed(nn.Module):
    "A softmax over prototypes that gets sharper with the samples seen."
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(6, 8)
        self.prototypes = nn.Parameter(torch.randn(4, 8))
        self.register_buffer("seen", torch.zeros(()))
    def forward(self, x):
        if self.training:
            self.seen += len(x)
        temperature = 0.1 + 0.9 * torch.exp(-self.seen / 100)
        return F.normalize(self.encode(x), dim=1) @ F.normalize(self.prototypes, dim=1).T / temperature

torch.manual_seed(0)
x, y = torch.randn(128, 6), torch.randint(0, 4, (128,))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=32, epochs=3))
model, loader, _ = manager.setup_training(Annealed(), TensorDataset(x, y), optimizer=lambda p: torch.optim.Adam(p, lr=0.01))
for epoch in range(manager.config.epochs):
    print(manager.train_epoch(loader, epoch))
manager.finish()
""",
    ),
    "targets_normalised_as_popart_does": (
        BUFFER + r"|buffer (mean|square)|mixes|over the batch",
        """
class Value(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 24), nn.Tanh()), nn.Linear(24, 1)
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("square", torch.ones(1))
    def update(self, returns):
        self.mean.lerp_(returns.mean().reshape(1), 0.1)
        self.square.lerp_(returns.square().mean().reshape(1), 0.1)
    def forward(self, x):
        return self.head(self.body(x))

def loss_fn(model, batch):
    states, returns = batch
    if model.training:
        model.update(returns)
    std = (model.square - model.mean**2).clamp(min=1e-4).sqrt()
    return F.mse_loss(model(states), (returns - model.mean) / std)

torch.manual_seed(0)
states = torch.randn(140, 4)
returns = 50 * states[:, :1].abs() + 10
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=28, max_steps=15))
manager.fit(Value(), TensorDataset(states, returns), loss_fn=loss_fn)
""",
    ),
    "router_bias_by_own_counts": (
        BUFFER,
        """
class Experts(nn.Module):
    "Experts balanced without a loss: a bias, moved against the load, decides who is chosen."
    def __init__(self):
        super().__init__()
        self.route = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.out = nn.Linear(8, 2)
        self.register_buffer("bias", torch.zeros(4))
    def forward(self, x):
        scores = self.route(x).softmax(-1)
        chosen = (scores + self.bias).argmax(-1)
        if self.training:
            load = F.one_hot(chosen, 4).sum(0)
            self.bias += 0.05 * torch.sign(len(x) / 4 - load)
        gate = scores.gather(1, chosen[:, None])
        return self.out(gate * torch.stack([e(x) for e in self.experts], 1)[torch.arange(len(x)), chosen])

torch.manual_seed(0)
x = torch.randn(150, 8)
y = (x[:, 0] * x[:, 1] > 0).long()
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=30, epochs=2, broadcast_buffers=True))
manager.fit(Experts(), TensorDataset(x, y), optimizer=lambda p: torch.optim.AdamW(p, lr=0.01))
""",
    ),
    # --- the loss ---
    "segments_without_the_ignored_pixels": (
        UNWEIGHTED,
        """
torch.manual_seed(0)
images = torch.rand(60, 3, 10, 10)
masks = (images.sum(1) * 1.2).long().clamp(0, 3)
for i in range(60):
    masks[i, : i % 9] = 255  # not annotated

def loss_fn(model, batch):
    x, y = batch
    logits = model(x)
    loss = F.cross_entropy(logits, y, ignore_index=255)
    known = y != 255
    return loss, len(x), {"pixels": ((logits.argmax(1) == y)[known].sum(), known.sum())}

net = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 4, 1))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2, learning_rate=3e-3))
manager.fit(net, TensorDataset(images, masks), loss_fn=loss_fn)
""",
    ),
    "weight_counts_the_padding": (
        UNWEIGHTED,
        """
PAD = 0
g = torch.Generator().manual_seed(1)
pairs = [torch.randint(1, 30, (int(n),), generator=g) for n in torch.randint(3, 14, (90,), generator=g)]

class Sentences(Dataset):
    def __len__(self):
        return len(pairs)
    def __getitem__(self, i):
        return F.pad(pairs[i], (0, 14 - len(pairs[i])), value=PAD)

class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(30, 12), nn.LSTM(12, 12, batch_first=True), nn.Linear(12, 30)
    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])

def loss_fn(model, ids):
    logits, wanted = model(ids[:, :-1]), ids[:, 1:]
    loss = F.cross_entropy(logits.transpose(1, 2), wanted, ignore_index=PAD, label_smoothing=0.1)
    return loss, wanted.numel()

def main(args):
    torch.manual_seed(args.seed)
    manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=args.batch, epochs=args.epochs))
    manager.fit(Decoder(), Sentences(), loss_fn=loss_fn)

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--batch", type=int, default=18)
parser.add_argument("--epochs", type=int, default=2)
main(parser.parse_args())
""",
    ),
    "divergence_summed_beside_a_mean": (
        r"is a sum|sum over the samples|not a mean|part of it is",
        """
class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(12, 6), nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 12))
    def forward(self, x, noise):
        mean, logvar = self.enc(x).chunk(2, 1)
        return self.dec(mean + noise * (logvar / 2).exp()), mean, logvar

def loss_fn(model, batch):
    x, noise = batch
    seen, mean, logvar = model(x, noise)
    kl = -0.5 * (1 + logvar - mean**2 - logvar.exp()).sum()
    return F.mse_loss(seen, x) + 1e-2 * kl

torch.manual_seed(0)
x = torch.randn(100, 12)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=20, epochs=3))
manager.fit(VAE(), TensorDataset(x), loss_fn=loss_fn, augment=lambda batch, random: (batch[0], random.normal(3)))
""",
    ),
    "returns_minus_their_mean": (
        WHOLE,
        """
class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 3))
    def forward(self, states):
        return torch.distributions.Categorical(logits=self.net(states))

def reinforce(policy, batch):
    states, actions, returns = batch
    baseline = returns.mean()
    spread = policy(states)
    return -(spread.log_prob(actions) * (returns - baseline)).mean() - 0.01 * spread.entropy().mean()

torch.manual_seed(0)
policy = Policy()
manager = MultiGPUTrainingManager(MultiGPUConfig(max_steps=20))
policy, _, _ = manager.setup_training(policy, loss_fn=reinforce, optimizer=torch.optim.Adam(policy.parameters(), lr=3e-3))
g = torch.Generator().manual_seed(8)
for step in range(manager.step, 20):
    states = torch.randn(50, 4, generator=g)
    actions = torch.randint(0, 3, (50,), generator=g)
    returns = (states[:, 0] * (actions - 1)) + torch.randn(50, generator=g)
    manager.trainer.train_step(manager.shard((states, actions, returns)))
manager.finish()
""",
    ),
    "replay_weights_over_their_maximum": (
        WHOLE,
        """
torch.manual_seed(0)
q = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 4))
target = copy.deepcopy(q).requires_grad_(False)
N = 200
replay = TensorDataset(torch.randn(N, 5), torch.randint(0, 4, (N,)), torch.randn(N), torch.randn(N, 5), torch.rand(N))

def td_loss(q, batch):
    state, action, reward, following, priority = batch
    with torch.no_grad():
        wanted = reward + 0.9 * target(following).max(1).values
    weight = (len(replay) * priority) ** -0.4
    weight = weight / weight.max()
    return (weight * F.smooth_l1_loss(q(state)[torch.arange(len(state)), action], wanted, reduction="none")).mean()

manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=50, epochs=2, max_grad_norm=10.0))
q, loader, _ = manager.setup_training(q, replay, loss_fn=td_loss, optimizer=torch.optim.RMSprop(q.parameters(), lr=1e-3))
for epoch in range(2):
    for batch in loader:
        result = manager.trainer.train_step(batch)
        if result.moved and result.step % 3 == 0:
            target.load_state_dict(q.state_dict())
manager.finish()
""",
    ),
    "loss_divided_by_accumulation_of_the_world": (
        r"(divided|multiplied|scaled) by|number of ranks",
        """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=24, epochs=2))
world = manager.placement.dp_size
accumulate = 24 // (2 * world)  # as in the old script: the loss is divided by the number of micro-batches

def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y) / accumulate

torch.manual_seed(0)
x, y = torch.randn(120, 10), torch.randint(0, 5, (120,))
model = nn.Sequential(nn.Linear(10, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 5))
manager.fit(model, TensorDataset(x, y), loss_fn=loss_fn, optimizer=torch.optim.SGD(model.parameters(), lr=0.3))
""",
    ),
    "task_chosen_by_rank": (
        r"depends on the rank",
        """
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, 16), nn.ReLU())
        self.heads = nn.ModuleList([nn.Linear(16, 3), nn.Linear(16, 1)])
    def forward(self, x):
        h = self.body(x)
        return self.heads[0](h), self.heads[1](h)

torch.manual_seed(0)
x = torch.randn(100, 7)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=20, epochs=2, find_unused_parameters=True))

def loss_fn(model, batch):
    x, kind, value = batch
    logits, guess = model(x)
    task = (manager.step + manager.placement.dp_rank) % 2  # the tasks take turns
    return F.cross_entropy(logits, kind) if task == 0 else F.mse_loss(guess, value)

data = TensorDataset(x, x.argmax(1) % 3, x.norm(dim=1, keepdim=True))
manager.fit(Two(), data, loss_fn=loss_fn, optimizer=lambda p: torch.optim.AdamW(p, lr=2e-3))
""",
    ),
    "loss_all_reduced_before_it_is_logged": (
        r"added up over the ranks|all_reduce|exchanges",
        """
import torch.distributed as dist

def loss_fn(model, batch):
    x, y = batch
    loss = F.l1_loss(model(x), y)
    if dist.is_initialized() and model.training:
        dist.all_reduce(loss.detach())  # so that the log shows all ranks
    return loss

torch.manual_seed(0)
x = torch.randn(88, 5)
model = nn.Sequential(nn.Linear(5, 12), nn.ELU(), nn.Linear(12, 1))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=22, epochs=2, log_every=2))
manager.fit(model, TensorDataset(x, x.sin().sum(1, keepdim=True)), loss_fn=loss_fn)
""",
    ),
    "masks_drawn_by_the_collator": (
        DATA + r"|collat",
        """
from transformers import BertConfig, BertForMaskedLM
from multi_gpu_training.training.loss import token_cross_entropy

g = torch.Generator().manual_seed(0)
sentences = torch.randint(5, 60, (64, 12), generator=g)

def mask_words(samples):
    ids = torch.stack(samples)
    chosen = torch.rand(ids.shape) < 0.15
    chosen[:, 0] = True
    labels = torch.where(chosen, ids, -100)
    return {"input_ids": torch.where(chosen, 4, ids), "labels": labels}

def loss_fn(model, batch):
    return token_cross_entropy(model(input_ids=batch["input_ids"]).logits, batch["labels"])

torch.manual_seed(0)
model = BertForMaskedLM(BertConfig(vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, max_position_embeddings=16))
loader = DataLoader(sentences, batch_size=16, shuffle=True, collate_fn=mask_words)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, max_steps=10, learning_rate=5e-4))
manager.fit(model, loader, loss_fn=loss_fn)
""",
    ),
    # --- the loop, optimizer and schedule ---
    "every_world_th_batch": (
        FEED,
        """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
torch.manual_seed(0)
x, y = torch.randn(192, 6), torch.randint(0, 3, (192,))
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
model, loader, _ = manager.setup_training(model, TensorDataset(x, y), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
rank, world = manager.placement.dp_rank, manager.placement.dp_size
for epoch in range(2):
    for i, batch in enumerate(loader):
        if i % world != rank:
            continue
        manager.trainer.train_step(batch)
manager.finish()
""",
    ),
    "rollouts_seeded_by_rank": (
        DATA + r"|batches",
        """
manager = MultiGPUTrainingManager(MultiGPUConfig(max_steps=12))
rank, world = manager.placement.dp_rank, manager.placement.dp_size
env = np.random.default_rng(50 + rank)

def collect(n):
    states = env.normal(size=(n, 3)).astype("float32")
    actions = env.integers(0, 2, n)
    rewards = (states[:, 0] * (2 * actions - 1)).astype("float32")
    return torch.from_numpy(states), torch.from_numpy(actions), torch.from_numpy(rewards)

torch.manual_seed(0)
actor = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))

def loss_fn(actor, batch):
    states, actions, rewards = batch
    chosen = F.log_softmax(actor(states), 1).gather(1, actions[:, None])[:, 0]
    return -(chosen * rewards).mean()

manager.setup_training(actor, loss_fn=loss_fn, optimizer=torch.optim.Adam(actor.parameters(), lr=0.01))
while manager.step < 12:
    manager.trainer.train_step(collect(60 // world))
manager.finish()
""",
    ),
    "discriminator_trained_by_hand": (
        r"past the wrapper|depends on the rank|keeps state|outside the trainer",
        """
torch.manual_seed(0)
real = torch.randn(160, 2) * torch.tensor([0.3, 1.5]) + 1
noise = torch.randn(160, 4)
G = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 2))
D = nn.Sequential(nn.Linear(2, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))
opt_d = torch.optim.Adam(D.parameters(), lr=1e-3)

def generator_loss(G, batch):
    return F.softplus(-D(G(batch[1]))).mean()

manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=32, epochs=2))
G, loader, _ = manager.setup_training(G, TensorDataset(real, noise), loss_fn=generator_loss, optimizer=torch.optim.Adam(G.parameters(), lr=1e-3))
for epoch in range(2):
    for batch in loader:
        truth, z = batch
        opt_d.zero_grad()
        (F.softplus(-D(truth)).mean() + F.softplus(D(G(z).detach())).mean()).backward()
        opt_d.step()
        manager.trainer.train_step(batch)
manager.finish()
""",
    ),
    "embedding_gradient_over_own_counts": (
        r"gradient",
        """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.out = nn.Embedding(15, 8), nn.Linear(8, 1)
        self.counts = torch.ones(15)
        self.emb.weight.register_hook(lambda g: g / self.counts.to(g)[:, None])  # rare words learn as fast
    def forward(self, ids):
        self.counts = torch.bincount(ids.flatten(), minlength=15).clamp(min=1)
        return self.out(self.emb(ids).mean(1))

torch.manual_seed(0)
ids = torch.randint(0, 15, (100, 5)) * torch.randint(0, 2, (100, 5))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=20, epochs=2))
manager.fit(Model(), TensorDataset(ids, ids.float().mean(1, keepdim=True)), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
""",
    ),
    "noise_added_to_the_weights_per_rank": (
        r"parameter .*chang|replicas|noise|generator",
        """
class Langevin(Callback):
    def __init__(self, rate):
        self.rate = rate
    def on_setup(self, run):
        self.random = torch.Generator().manual_seed(run.placement.dp_rank)
    @torch.no_grad()
    def on_step_end(self, run, result):
        for p in run.model.parameters():
            p.add_(torch.randn(p.shape, generator=self.random).to(p), alpha=math.sqrt(2e-4 * self.rate))

torch.manual_seed(0)
x = torch.randn(100, 3)
model = nn.Sequential(nn.Linear(3, 10), nn.Tanh(), nn.Linear(10, 1))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=25, epochs=2, consistency_check_every=0))
manager.fit(model, TensorDataset(x, x.norm(dim=1, keepdim=True)), optimizer=torch.optim.SGD(model.parameters(), lr=0.01), callbacks=[Langevin(0.01)])
""",
    ),
    "rate_follows_own_validation": (
        r"rate",
        """
class Plateau(Callback):
    best, waited = math.inf, 0
    def on_validation(self, run, metrics):
        total, weight = run.evaluated.pair("loss")
        mine = float(total) / max(float(weight), 1)
        if mine < self.best - 0.02:
            self.best, self.waited = mine, 0
        else:
            for group in run.optimizer.param_groups:
                group["lr"] *= 0.5 + 0.1 * mine

torch.manual_seed(0)
x, y = torch.randn(140, 6), torch.randint(0, 3, (140,))
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
train, val = TensorDataset(x[:100], y[:100]), TensorDataset(x[100:], y[100:])
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=20, epochs=6, validate_every=2))
manager.fit(model, train, val, optimizer=torch.optim.SGD(model.parameters(), lr=0.05), callbacks=[Plateau()])
""",
    ),
    "clip_norm_times_world": (
        r"clip|max_grad_norm",
        """
def main():
    manager = MultiGPUTrainingManager()
    world = manager.placement.dp_size
    manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=32, epochs=2, max_grad_norm=0.05 * world))
    torch.manual_seed(0)
    x = torch.randn(128, 10, 3)
    y = x.cumsum(1)[:, -1]
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = nn.LSTM(3, 16, batch_first=True), nn.Linear(16, 3)
        def forward(self, x):
            return self.out(self.rnn(x)[0][:, -1])
    model = Last()
    manager.fit(model, TensorDataset(x, y), optimizer=torch.optim.SGD(model.parameters(), lr=0.5))

if __name__ == "__main__":
    main()
""",
    ),
    "second_training_divides_by_world": (
        r"divided by the number of ranks",
        """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=24, epochs=1))
torch.manual_seed(0)
x, y = torch.randn(96, 8), torch.randint(0, 4, (96,))
encoder = nn.Sequential(nn.Linear(8, 6), nn.ReLU())
autoencoder = nn.Sequential(encoder, nn.Linear(6, 8))
manager.fit(autoencoder, TensorDataset(x, x))

world = manager.placement.dp_size
classifier = nn.Sequential(encoder, nn.Linear(6, 4))
second = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=24, epochs=2))
second.fit(classifier, TensorDataset(x, y), loss_fn=lambda m, b: F.cross_entropy(m(b[0]), b[1]) / world, optimizer=lambda p: torch.optim.SGD(p, lr=0.2))
""",
    ),
    "averaged_weights_decay_with_world": (
        r"(?i)averag|ema",
        """
manager = MultiGPUTrainingManager()
world = manager.placement.dp_size
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=20, epochs=3, ema_decay=0.9**world))
torch.manual_seed(0)
x, y = torch.randn(120, 5), torch.randint(0, 2, (120,))
model = nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 2))
result = manager.fit(model, TensorDataset(x[:100], y[:100]), TensorDataset(x[100:], y[100:]), optimizer=lambda p: torch.optim.Adam(p, lr=0.02))
manager.say(f"{result.metrics}")
""",
    ),
    "steps_shared_out_over_the_ranks": (
        r"steps|ends|number of ranks|each rank brings as many samples",
        """
def get_batch(step):
    g = torch.Generator().manual_seed(step)
    x = torch.rand(48, 2, generator=g) * 4 - 2
    return x, (x[:, :1] ** 2 - x[:, 1:]).abs()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 24), nn.SiLU(), nn.Linear(24, 1))
manager = MultiGPUTrainingManager(MultiGPUConfig(max_steps=100))
model, _, _ = manager.setup_training(model, loss_fn=nn.MSELoss(), optimizer=torch.optim.Adam(model.parameters(), lr=5e-3))
rank, world = manager.placement.dp_rank, manager.placement.dp_size
for step in range(rank, 24, world):  # the ranks share the steps
    manager.trainer.train_step(get_batch(step))
manager.finish()
""",
    ),
    # --- validation ---
    "perplexity_per_batch": (
        r"metric perplexity",
        """
class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.mix, self.out = nn.Embedding(25, 16), nn.Conv1d(16, 16, 3), nn.Linear(16, 25)
    def forward(self, ids):
        h = self.mix(F.pad(self.emb(ids).transpose(1, 2), (2, 0)))
        return self.out(h.transpose(1, 2).relu())

def loss_fn(model, ids):
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

def eval_fn(model, ids, metrics):
    loss = loss_fn(model, ids)
    metrics.add("loss", loss * len(ids), len(ids))
    metrics.add("perplexity", loss.exp() * len(ids), len(ids))

torch.manual_seed(0)
ids = torch.randint(0, 25, (130, 9))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=26, epochs=2, best_metric="perplexity"))
manager.fit(Language(), ids[:100], ids[100:], loss_fn=loss_fn, eval_fn=eval_fn)
""",
    ),
    "validation_on_own_part": (
        r"validation|metric",
        """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=25, epochs=2))
rank, world = manager.placement.dp_rank, manager.placement.dp_size
torch.manual_seed(0)
x, y = torch.randn(160, 4), torch.randint(0, 3, (160,))

class Part(Dataset):
    def __init__(self, keep):
        self.keep = list(keep)
    def __len__(self):
        return len(self.keep)
    def __getitem__(self, i):
        return x[self.keep[i]], y[self.keep[i]]

held_out = range(100, 160)
train, val = Part(range(100)), Part(held_out[rank::world])
model = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 3))
manager.fit(model, train, val, optimizer=torch.optim.Adam(model.parameters(), lr=0.01))
""",
    ),
}

CORRECT: dict[str, str] = {
    "parameter_hooks_clamp_the_whole_gradient": """
torch.manual_seed(0)
x, y = torch.randn(110, 6), torch.randint(0, 3, (110,))
model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3))
for p in model.parameters():
    p.register_hook(lambda g: g.clamp(-0.02, 0.02))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=22, epochs=2))
manager.fit(model, TensorDataset(x, y), optimizer=torch.optim.SGD(model.parameters(), lr=0.2))
""",
    "activations_kept_by_forward_hooks": """
seen = {}
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2))
for name, layer in model.named_modules():
    if isinstance(layer, nn.ReLU):
        layer.register_forward_hook(lambda m, i, o, name=name: seen.__setitem__(name, o))

def loss_fn(model, batch):
    x, y = batch
    loss = F.cross_entropy(model(x), y)
    sparse = sum(a.abs().mean(1).mean() for a in seen.values())
    return loss + 0.01 * sparse

x, y = torch.randn(101, 5), torch.randint(0, 2, (101,))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=17, epochs=2))
manager.fit(model, TensorDataset(x, y), loss_fn=loss_fn)
""",
    "sampler_that_knows_the_epoch": """
class EasyFirst(Sampler):
    "The easy half in the first epoch, all after it."
    def __init__(self, difficulty, seed=0):
        self.order, self.seed, self.epoch = torch.argsort(difficulty).tolist(), seed, 0
    def set_epoch(self, epoch):
        self.epoch = epoch
    def __iter__(self):
        keep = self.order[: len(self)]
        random.Random(self.seed + self.epoch).shuffle(keep)
        yield from keep
    def __len__(self):
        return len(self.order) // 2 if self.epoch == 0 else len(self.order)

torch.manual_seed(0)
x = torch.randn(96, 4)
y = x.sum(1, keepdim=True)
model = nn.Linear(4, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=12, sampler=EasyFirst(x.norm(dim=1)))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=3))
manager.fit(model, loader, optimizer=torch.optim.SGD(model.parameters(), lr=0.05))
""",
    "weighted_random_sampler": """
torch.manual_seed(0)
y = (torch.rand(130) < 0.1).long()
x = torch.randn(130, 6) + y[:, None]
weights = torch.where(y == 1, 1 / (y == 1).sum(), 1 / (y == 0).sum())
loader = DataLoader(TensorDataset(x, y), batch_size=26, sampler=WeightedRandomSampler(weights, 104), drop_last=True)
model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 2))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=26, epochs=2, max_grad_norm=0.5))
result = manager.fit(model, loader, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))
manager.say(f"{result.history}")
""",
    "buckets_by_length": """
lengths = [2 + (5 * i) % 11 for i in range(66)]
torch.manual_seed(0)
rows = [torch.randn(n, 3) for n in lengths]

class Buckets:
    def __iter__(self):
        order = sorted(range(66), key=lengths.__getitem__)
        batches = [order[i : i + 11] for i in range(0, 66, 11)]
        return iter([batches[i] for i in np.random.default_rng(3).permutation(6)])
    def __len__(self):
        return 6

class Rows(Dataset):
    def __len__(self):
        return 66
    def __getitem__(self, i):
        return {"row": rows[i], "length": lengths[i], "sum": rows[i].sum()}

def collate(samples):
    return {
        "row": nn.utils.rnn.pad_sequence([s["row"] for s in samples], batch_first=True),
        "length": torch.tensor([s["length"] for s in samples]),
        "sum": torch.stack([s["sum"] for s in samples]),
    }

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.GRU(3, 12, batch_first=True), nn.Linear(12, 1)
    def forward(self, row, length):
        packed = nn.utils.rnn.pack_padded_sequence(row, length.cpu(), batch_first=True, enforce_sorted=False)
        return self.out(self.rnn(packed)[1][0])[:, 0]

model = Net()
manager = MultiGPUTrainingManager(MultiGPUConfig(epochs=2))
manager.fit(model, DataLoader(Rows(), batch_sampler=Buckets(), collate_fn=collate),
            loss_fn=lambda m, b: F.mse_loss(m(b["row"], b["length"]), b["sum"]), optimizer=torch.optim.Adam(model.parameters(), lr=1e-2))
""",
    "averaged_weights_and_two_validation_sets": """
torch.manual_seed(0)
x, y = torch.randn(200, 5), torch.randint(0, 3, (200,))
sets = {"near": TensorDataset(x[120:150], y[120:150]), "far": TensorDataset(3 * x[150:], y[150:])}
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=30, epochs=3, ema_decay=0.9, best_metric="far/loss", validate_at_start=True))
model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))
result = manager.fit(model, TensorDataset(x[:120], y[:120]), sets, optimizer=lambda p: torch.optim.Adam(p, lr=1e-2))
if manager.placement.is_main:
    print(json.dumps({k: round(v, 4) for k, v in result.metrics.items()}))
""",
    "own_average_evaluated_in_a_callback": """
class Average(Callback):
    def __init__(self, model, decay=0.8):
        self.shadow, self.decay = copy.deepcopy(model).requires_grad_(False), decay
    def state_dict(self):
        return self.shadow.state_dict()
    def load_state_dict(self, state):
        self.shadow.load_state_dict(state)
    @torch.no_grad()
    def on_step_end(self, run, result):
        for mine, new in zip(self.shadow.parameters(), run.model.parameters()):
            mine.data = mine.data.to(new).lerp(new, 1 - self.decay)

def eval_fn(model, batch, metrics):
    x, y = batch
    metrics.add("loss", F.mse_loss(model(x), y, reduction="sum"), y.numel())
    shadow = average.shadow.to(x).eval()
    metrics.add("averaged", F.mse_loss(shadow(x), y, reduction="sum"), y.numel())

torch.manual_seed(0)
x = torch.randn(140, 4)
y = torch.stack([x.prod(1), x.sum(1)], 1)
model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
average = Average(model)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=20, epochs=2, learning_rate=0.01))
manager.fit(model, TensorDataset(x[:100], y[:100]), TensorDataset(x[100:], y[100:]), loss_fn=nn.MSELoss(), eval_fn=eval_fn, callbacks=[average], states={"average": average})
""",
    "gradient_penalty_per_sample": """
def loss_fn(model, batch):
    x, y = batch
    x = x.detach().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.mse_loss(out, y) + 0.1 * (slope.norm(dim=1) - 1).square().mean()

torch.manual_seed(0)
x = torch.randn(100, 3)
model = nn.Sequential(nn.Linear(3, 16), nn.Softplus(), nn.Linear(16, 1))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=20, epochs=2))
manager.fit(model, TensorDataset(x, x.norm(dim=1, keepdim=True)), loss_fn=loss_fn, optimizer=torch.optim.Adam(model.parameters(), lr=1e-3))
""",
    "features_cached_on_first_use": """
class Cached(Dataset):
    def __init__(self, n):
        self.n, self.cache = n, {}
    def __len__(self):
        return self.n
    def __getitem__(self, i):
        if i not in self.cache:
            g = torch.Generator().manual_seed(i)
            wave = torch.randn(64, generator=g)
            self.cache[i] = torch.fft.rfft(wave).abs().log1p(), int(wave[:32].mean() > 0)
        return self.cache[i]

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(33, 16), nn.ReLU(), nn.Linear(16, 2))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=3))
manager.fit(model, Cached(70), Cached(20), optimizer=lambda p: torch.optim.RMSprop(p, lr=1e-3))
""",
    "whole_stream_on_every_rank": """
class Lines(IterableDataset):
    def __init__(self, seed):
        self.seed, self.epoch = seed, 0
    def __iter__(self):
        rng = np.random.default_rng((self.seed, self.epoch))
        self.epoch += 1
        while True:
            x = rng.normal(size=4).astype(np.float32)
            yield x, np.float32([x[0] * x[1]])

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=24, steps_per_epoch=6, epochs=2, schedule="cosine", warmup_steps=2))
manager.fit(model, Lines(3), loss_fn=nn.MSELoss())
""",
    "shards_of_own_format": """
from multi_gpu_training import ShardedStream

def samples_of(shard):
    rng = np.random.default_rng(int(shard.split("-")[1]))
    for _ in range(24):
        yield rng.integers(0, 10, 6)

def decode(row):
    row = torch.from_numpy(row)
    return F.one_hot(row, 10).float().flatten(), row.sum() % 3

torch.manual_seed(0)
stream = ShardedStream([f"part-{i}" for i in range(8)], open_shard=samples_of, decode=decode, buffer=16)
model = nn.Sequential(nn.Linear(60, 20), nn.ReLU(), nn.Linear(20, 3))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=1))
manager.fit(model, stream)
""",
    "dropout_in_a_transformer": """
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(30, 16)
        self.place = nn.Parameter(torch.randn(10, 16) * 0.02)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.body, self.out = nn.TransformerEncoder(layer, 2), nn.Linear(16, 4)
    def forward(self, ids):
        return self.out(self.body(self.emb(ids) + self.place, src_key_padding_mask=ids == 0).mean(1))

torch.manual_seed(0)
ids = torch.randint(1, 30, (90, 10))
ids[:30, 7:] = 0
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=18, epochs=2, warmup_steps=3, max_grad_norm=1.0))
manager.fit(Encoder(), TensorDataset(ids, ids.sum(1) % 4))
""",
    "flips_and_noise_on_the_device": """
def augment(batch, random):
    x, y = batch
    flip = random.uniform(1, 1, 1) < 0.5
    x = torch.where(flip, x.flip(-1), x)
    shift = random.integers(0, 3, 1)
    x = torch.stack([torch.roll(one, int(s), -1) for one, s in zip(x, shift[:, 0])]) if len(x) else x
    return x + 0.05 * random.normal(*x.shape[1:]).to(x), y

torch.manual_seed(0)
x, y = torch.rand(80, 1, 8, 8), torch.randint(0, 3, (80,))
model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 3))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
manager.fit(model, TensorDataset(x, y), augment=augment, optimizer=torch.optim.SGD(model.parameters(), lr=0.05, nesterov=True, momentum=0.9))
""",
    "three_generators_in_getitem": """
class Augmented(Dataset):
    def __init__(self):
        self.own = np.random.default_rng(5)
        self.x = torch.linspace(-1, 1, 90)[:, None] * torch.ones(6)
    def __len__(self):
        return 90
    def __getitem__(self, i):
        x = self.x[i] + 0.1 * torch.randn(6)
        if random.random() < 0.5:
            x = -x
        x = x * np.random.uniform(0.9, 1.1) + float(self.own.normal()) * 0.01
        return x.float(), torch.tensor([abs(self.x[i, 0])])

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=15, epochs=2, num_workers=1))
manager.fit(model, Augmented(), optimizer=torch.optim.Adam(model.parameters(), lr=0.01))
""",
    "sync_bn_with_accumulation": """
class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c), nn.ReLU())
    def forward(self, x):
        return x + self.net(x)

torch.manual_seed(0)
x = torch.rand(96, 3, 6, 6)
y = (x[:, 0].mean((1, 2)) > x[:, 1].mean((1, 2))).long()
model = nn.Sequential(nn.Conv2d(3, 8, 1), Block(8), Block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
config = MultiGPUConfig(global_batch_size=24, gradient_accumulation_steps=2, sync_bn=True, epochs=2)
MultiGPUTrainingManager(config).fit(model, TensorDataset(x, y), optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4))
""",
    "hf_classifier": """
from transformers import BertConfig, BertForSequenceClassification

class Texts(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(3, 50, (n, 12), generator=g)
        self.mask = (torch.arange(12) < torch.randint(4, 13, (n, 1), generator=g)).long()
    def __len__(self):
        return len(self.ids)
    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "attention_mask": self.mask[i], "labels": self.ids[i, 0] % 3}

torch.manual_seed(0)
model = BertForSequenceClassification(BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=3))
no_decay = [p for n, p in model.named_parameters() if "bias" in n or "LayerNorm" in n]
decay = [p for n, p in model.named_parameters() if not ("bias" in n or "LayerNorm" in n)]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.01}, {"params": no_decay, "weight_decay": 0.0}], lr=5e-4)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2, schedule="linear", warmup_steps=2, max_grad_norm=1.0))
manager.fit(model, Texts(80, 0), Texts(24, 1), optimizer=optimizer)
""",
    "hf_causal_with_padding": """
from transformers import GPT2Config, GPT2LMHeadModel

def collate(samples):
    longest = max(len(s) for s in samples)
    ids = torch.stack([F.pad(s, (0, longest - len(s))) for s in samples])
    mask = torch.stack([F.pad(torch.ones_like(s), (0, longest - len(s))) for s in samples])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

g = torch.Generator().manual_seed(0)
texts = [torch.randint(1, 40, (int(n),), generator=g) for n in torch.randint(4, 15, (72,), generator=g)]
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2, learning_rate=1e-3))
manager.fit(model, DataLoader(texts, batch_size=12, shuffle=True, collate_fn=collate))
""",
    "hf_token_loss_with_weight": """
from transformers import T5Config, T5ForConditionalGeneration
from multi_gpu_training.training.loss import token_cross_entropy

torch.manual_seed(0)
source = torch.randint(2, 32, (64, 9))
target = source.flip(1)[:, :6].clone()
target[::3, 4:] = -100

def loss_fn(model, batch):
    source, target = batch
    return token_cross_entropy(model(input_ids=source, labels=target).logits, target)

model = T5ForConditionalGeneration(T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
manager.fit(model, TensorDataset(source, target), loss_fn=loss_fn)
""",
    "compiled_model": """
torch.manual_seed(0)
x = torch.randn(96, 8)
model = torch.compile(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1)), backend="eager")
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=24, epochs=2))
manager.fit(model, TensorDataset(x, x.square().sum(1, keepdim=True)), loss_fn=nn.HuberLoss(), optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3))
""",
    "early_stopping": """
torch.manual_seed(0)
x, y = torch.randn(120, 4), torch.randint(0, 2, (120,))
model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=20, epochs=30, early_stopping_patience=1, validate_every=2))
result = manager.fit(model, TensorDataset(x[:60], y[:60]), TensorDataset(x[60:], y[60:]), optimizer=torch.optim.Adam(model.parameters(), lr=0.05))
manager.say(f"stopped after {result.steps} steps, best {result.best}")
""",
    "callback_lowers_the_rate": """
class Stairs(Callback):
    def on_step_begin(self, run, step):
        if step in (3, 6):
            for group in run.optimizer.param_groups:
                group["lr"] *= 0.3
    def on_validation(self, run, metrics):
        if metrics["loss"] > 1.0:
            run.optimizer.param_groups[0]["momentum"] = 0.8

torch.manual_seed(0)
x, y = torch.randn(130, 5), torch.randint(0, 4, (130,))
model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 4))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=20, epochs=3, validate_every=4))
manager.fit(model, TensorDataset(x[:100], y[:100]), TensorDataset(x[100:], y[100:]), optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), callbacks=[Stairs()])
""",
    "evaluated_inside_the_loop": """
torch.manual_seed(0)
x = torch.randn(150, 3)
y = (x[:, 0] > x[:, 1]).long()
train, test = TensorDataset(x[:100], y[:100]), TensorDataset(x[100:], y[100:])
model = nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 2))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=20, epochs=2))
model, loader, _ = manager.setup_training(model, train, optimizer=torch.optim.SGD(model.parameters(), lr=0.3))
history = []
for epoch in range(manager.trainer.epoch, 2):
    for batch in loader:
        result = manager.trainer.train_step(batch)
        if result.step % 3 == 0:
            history.append(manager.evaluate(test)["accuracy"])
            manager.say(f"{result.step}: {history[-1]:.3f}")
    if history and history[-1] > 0.99:
        break
manager.finish()
""",
    "dataclass_and_argparse": """
@dataclasses.dataclass
class Args:
    hidden: int = 24
    lr: float = 3e-3
    epochs: int = 2
    batch: int = 18
    seed: int = 3

def parse():
    parser = argparse.ArgumentParser()
    for field in dataclasses.fields(Args):
        parser.add_argument(f"--{field.name}", type=field.type if callable(field.type) else eval(field.type), default=field.default)
    return Args(**vars(parser.parse_args()))

def build(args):
    torch.manual_seed(args.seed)
    return nn.Sequential(nn.Linear(6, args.hidden), nn.Mish(), nn.Linear(args.hidden, 2))

def data(args):
    g = torch.Generator().manual_seed(args.seed)
    x = torch.randn(110, 6, generator=g)
    return random_split(TensorDataset(x, (x.sum(1) > 0).long()), [90, 20], torch.Generator().manual_seed(42))

def main():
    args = parse()
    manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=args.batch, epochs=args.epochs))
    train, val = data(args)
    manager.fit(lambda: build(args), train, val, optimizer=lambda p: torch.optim.NAdam(p, lr=args.lr))

if __name__ == "__main__":
    main()
""",
    "batches_from_a_python_generator": """
def batches(seed):
    rng = np.random.default_rng(seed)
    while True:
        a, b = rng.integers(0, 10, (2, 40))
        yield torch.from_numpy(np.stack([a, b], 1)), torch.from_numpy((a + b) % 10)

class Adder(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(10, 12)
        self.out = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 10))
    def forward(self, pair):
        return self.out(self.emb(pair).flatten(1))

def main():
    torch.manual_seed(0)
    manager = MultiGPUTrainingManager(MultiGPUConfig(max_steps=15))
    model, _, _ = manager.setup_training(Adder(), optimizer=lambda p: torch.optim.Adam(p, lr=3e-3))
    source = batches(1)
    for step in range(manager.step, 15):
        manager.trainer.train_step(manager.shard(next(source)))
    manager.finish()

if __name__ == "__main__":
    main()
""",
    "two_tasks_one_body": """
class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, 24), nn.ReLU())
        self.kind, self.size = nn.Linear(24, 3), nn.Linear(24, 1)
        self.log_vars = nn.Parameter(torch.zeros(2))
    def forward(self, x):
        h = self.body(x)
        return self.kind(h), self.size(h).squeeze(1)

def loss_fn(model, batch):
    kind, size = model(batch["x"])
    a, b = F.cross_entropy(kind, batch["kind"]), F.mse_loss(size, batch["size"])
    s = model.log_vars
    n = len(batch["x"])
    return (a * torch.exp(-s[0]) + b * torch.exp(-s[1]) + s.sum()), n, {"kind_loss": (a * n, n), "size_loss": (b * n, n)}

class Things(Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(0)
        self.x = torch.randn(100, 7, generator=g)
    def __len__(self):
        return 100
    def __getitem__(self, i):
        return {"x": self.x[i], "kind": self.x[i].argmax() % 3, "size": self.x[i].norm()}

torch.manual_seed(0)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=20, epochs=2))
manager.fit(Shared(), Things(), loss_fn=loss_fn, optimizer=lambda p: torch.optim.Adam(p, lr=5e-3))
""",
    "curriculum_by_step": """
class Sums(Dataset):
    hardness = 1
    def __len__(self):
        return 96
    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        terms = torch.randn(4, generator=g)
        terms[self.hardness :] = 0
        return terms, terms.sum().reshape(1)

class Harder(Callback):
    def on_epoch_begin(self, run, epoch):
        data.hardness = min(4, 1 + epoch)

data = Sums()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=24, epochs=4))
manager.fit(model, data, callbacks=[Harder()], optimizer=torch.optim.SGD(model.parameters(), lr=0.02))
""",
    "figures_and_files_on_the_main_rank": """
import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt

class Draw(Callback):
    watches_only = True
    def __init__(self):
        self.losses = []
    def on_step_end(self, run, result):
        self.losses.append(float(result.loss))
    def on_end(self, run):
        if run.placement.is_main:
            figure, axes = plt.subplots()
            axes.plot(self.losses)
            figure.savefig(run.folder / "losses.png")
            plt.close(figure)
            torch.save(run.model.state_dict(), run.folder / "last.pt")
            (run.folder / "losses.json").write_text(json.dumps(self.losses))

torch.manual_seed(0)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
if manager.placement.is_main:
    print("starting with", manager.placement.dp_size, "ranks, noise", np.random.rand())
x = torch.randn(80, 4)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
manager.fit(model, TensorDataset(x, x.abs().sum(1, keepdim=True)), callbacks=[Draw()])
""",
    "tracker_that_looks_like_wandb": """
class Tracker:
    def __init__(self, enabled):
        self.enabled, self.rows = enabled, []
    def log(self, row):
        if self.enabled:
            self.rows.append(row)
    def watch(self, model):
        if self.enabled:
            for name, p in model.named_parameters():
                p.register_hook(lambda g, name=name: self.log({f"grad/{name}": float(g.norm())}))

class Send(Callback):
    def on_log(self, run, metrics, step):
        tracker.log({"step": step, **metrics})
        if run.placement.is_main:
            with torch.no_grad():
                tracker.log({f"weight/{n}": p.norm().item() for n, p in run.model.named_parameters()})
    def on_validation(self, run, metrics):
        run.log(gap=metrics["loss"] - 0.5)

torch.manual_seed(0)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2, log_every=2))
tracker = Tracker(manager.placement.is_main)
x, y = torch.randn(100, 5), torch.randint(0, 2, (100,))
model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))
tracker.watch(model)
manager.fit(model, TensorDataset(x[:80], y[:80]), TensorDataset(x[80:], y[80:]), callbacks=[Send()])
""",
    "teacher_then_student": """
torch.manual_seed(0)
x, y = torch.randn(120, 6), torch.randint(0, 3, (120,))
data = TensorDataset(x, y)

def net(width):
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))

teacher = net(32)
MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=24, epochs=2, recipe="teacher")).fit(teacher, data, optimizer=lambda p: torch.optim.Adam(p, lr=0.01))
teacher.eval().requires_grad_(False)

def distil(model, batch):
    x, y = batch
    mine = model(x)
    return F.cross_entropy(mine, y) + 4 * F.kl_div(F.log_softmax(mine / 2, 1), F.softmax(teacher.to(x)(x) / 2, 1), reduction="batchmean")

torch.manual_seed(1)
MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=24, epochs=2, recipe="student")).fit(net(8), data, loss_fn=distil)
""",
    "layers_unfrozen_on_the_way": """
torch.manual_seed(0)
body, head = nn.Sequential(nn.Linear(5, 16), nn.ReLU()), nn.Linear(16, 2)
model = nn.Sequential(body, head)
body.requires_grad_(False)
optimizer = torch.optim.SGD(head.parameters(), lr=0.1, momentum=0.9)
x, y = torch.randn(96, 5), torch.randint(0, 2, (96,))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=3))
model, loader, _ = manager.setup_training(model, TensorDataset(x, y), optimizer=optimizer)
for epoch in range(manager.trainer.epoch, 3):
    for batch in loader:
        if manager.step == 3:
            body.requires_grad_(True)
            optimizer.add_param_group({"params": list(body.parameters()), "lr": 0.01})
        manager.trainer.train_step(batch)
manager.finish()
""",
    "one_cycle_with_steps_of_the_manager": """
torch.manual_seed(0)
x, y = torch.randn(120, 5), torch.randint(0, 3, (120,))
data = TensorDataset(x, y)
model = nn.Sequential(nn.Linear(5, 20), nn.ReLU(), nn.Linear(20, 3))
optimizer = torch.optim.AdamW(model.parameters())
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=3))
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=3 * manager.steps_per_epoch(data))
manager.fit(model, data, optimizer=optimizer, scheduler=scheduler)
""",
    "plateau_scheduler": """
torch.manual_seed(0)
x = torch.randn(140, 4)
y = x.sin().sum(1, keepdim=True)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=50, epochs=5, scheduler_unit="epoch"))
manager.fit(model, TensorDataset(x[:100], y[:100]), TensorDataset(x[100:], y[100:]), optimizer=lambda p: torch.optim.SGD(p, lr=0.5),
            scheduler=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0))
""",
    "margin_loss_with_own_weights": """
class ArcFace(nn.Module):
    def __init__(self, width, classes, margin=0.2, scale=8.0):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, width))
        self.margin, self.scale = margin, scale
    def forward(self, features, target):
        cos = F.normalize(features) @ F.normalize(self.weight).T
        cos = cos.clamp(-1 + 1e-6, 1 - 1e-6)
        wide = (cos.acos() + self.margin).cos()
        hot = F.one_hot(target, len(self.weight)).bool()
        return F.cross_entropy(self.scale * torch.where(hot, wide, cos), target)

torch.manual_seed(0)
x, y = torch.randn(105, 8), torch.randint(0, 5, (105,))
model, criterion = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6)), ArcFace(6, 5)
optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": criterion.parameters(), "lr": 0.5}], lr=0.05)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=21, epochs=2))
manager.fit(model, TensorDataset(x, y), loss_fn=criterion, optimizer=optimizer)
""",
    "parametrised_weights": """
from torch.nn.utils.parametrizations import spectral_norm, weight_norm, orthogonal
torch.manual_seed(0)
model = nn.Sequential(spectral_norm(nn.Linear(6, 16)), nn.LeakyReLU(), weight_norm(nn.Linear(16, 16)), nn.LeakyReLU(), orthogonal(nn.Linear(16, 16)), nn.Linear(16, 1))
x = torch.randn(100, 6)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=20, epochs=2))
manager.fit(model, TensorDataset(x, x[:, :1].exp()), optimizer=torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.9)))
""",
    "graphs_in_lists": """
class Graph:
    def __init__(self, i):
        g = torch.Generator().manual_seed(i)
        n = 3 + i % 5
        self.nodes = torch.randn(n, 4, generator=g)
        adjacency = (torch.rand(n, n, generator=g) < 0.4).float()
        self.edges = torch.eye(n) + adjacency + adjacency.T
        self.target = self.nodes.sum()

class Graphs(Dataset):
    def __len__(self):
        return 60
    def __getitem__(self, i):
        return Graph(i)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.out = nn.Linear(4, 16), nn.Linear(16, 1)
    def forward(self, graph):
        like = self.first.weight
        return self.out(torch.relu(graph.edges.to(like) @ self.first(graph.nodes.to(like)))).sum()

def loss_fn(model, graphs):
    return torch.stack([(model(g) - g.target.to(model.first.weight)).square() for g in graphs]).mean(), len(graphs)

torch.manual_seed(0)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=10, epochs=2, learning_rate=5e-3))
manager.fit(Net(), DataLoader(Graphs(), batch_size=10, shuffle=True, collate_fn=list), loss_fn=loss_fn)
""",
    "folds_one_after_the_other": """
torch.manual_seed(0)
x = torch.randn(90, 5)
y = (x[:, 0] + x[:, 1] > 0).long()
everything = TensorDataset(x, y)
scores = []
for fold in range(3):
    held_out = set(range(fold * 30, fold * 30 + 30))
    train = Subset(everything, [i for i in range(90) if i not in held_out])
    torch.manual_seed(fold)
    model = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 2))
    manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=20, epochs=2))
    result = manager.fit(model, train, Subset(everything, sorted(held_out)), optimizer=lambda p: torch.optim.Adam(p, lr=0.02))
    scores.append(result.metrics["accuracy"])
manager.say(f"mean accuracy {np.mean(scores):.3f}")
""",
    "tied_embeddings": """
class Tied(nn.Module):
    def __init__(self, words=24, width=16):
        super().__init__()
        self.emb = nn.Embedding(words, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, words, bias=False)
        self.out.weight = self.emb.weight
    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])

def loss_fn(model, ids):
    wanted = ids[:, 1:]
    mask = wanted != 0
    losses = F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), wanted, reduction="none")
    return (losses * mask).sum() / mask.sum(), mask.sum(), {"bits": ((losses * mask).sum() / math.log(2), mask.sum())}

torch.manual_seed(0)
ids = torch.randint(1, 24, (80, 10))
ids[::2, 6:] = 0
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2))
manager.fit(Tied(), ids, loss_fn=loss_fn)
""",
    "rows_of_a_rank_taken_by_hand": """
manager = MultiGPUTrainingManager(MultiGPUConfig(max_steps=12, max_grad_norm=1.0))
rank, world = manager.placement.dp_rank, manager.placement.dp_size
torch.manual_seed(0)
x, y = torch.randn(500, 4), torch.randint(0, 3, (500,))
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
manager.setup_training(model, loss_fn=nn.CrossEntropyLoss(), optimizer=torch.optim.AdamW(model.parameters(), lr=0.01))
order = torch.Generator().manual_seed(1)
for step in range(manager.step, 12):
    rows = torch.randint(0, 500, (31,), generator=order)[rank::world]  # 16 and 15 on two ranks
    manager.trainer.train_step((x[rows], y[rows]))
manager.finish()
""",
    "scaled_rate_warmup_cosine": """
torch.manual_seed(0)
x, y = torch.randn(200, 6), torch.randint(0, 4, (200,))
model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD([{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2].parameters(), "lr": 0.03, "weight_decay": 0.1}], momentum=0.9)
config = MultiGPUConfig(global_batch_size=40, base_batch_size=10, lr_scaling="sqrt", warmup_epochs=1, schedule="cosine", epochs=3)
MultiGPUTrainingManager(config).fit(model, TensorDataset(x, y), optimizer=optimizer)
""",
    "confusion_and_sums_in_validation": """
def eval_fn(model, batch, metrics):
    x, y = batch
    logits = model(x)
    p = logits.softmax(1)
    metrics.add("loss", F.cross_entropy(logits, y, reduction="sum"), len(y))
    metrics.add("brier", (p - F.one_hot(y, 3)).square().sum(), len(y))
    metrics.add("share_of_ones", (logits.argmax(1) == 1).sum(), len(y))
    metrics.add_predictions(logits.argmax(1), y, classes=3)

torch.manual_seed(0)
x, y = torch.randn(171, 5), torch.randint(0, 3, (171,))
model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))
val = DataLoader(TensorDataset(x[100:], y[100:]), batch_size=13)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=20, epochs=2, best_metric="f1"))
manager.fit(model, DataLoader(TensorDataset(x[:100], y[:100]), batch_size=20, shuffle=True), val, eval_fn=eval_fn)
""",
    "checkpointed_blocks_in_the_model": """
from torch.utils.checkpoint import checkpoint

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12)) for _ in range(4))
        self.out = nn.Linear(12, 1)
    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.out(x)

torch.manual_seed(0)
x = torch.randn(90, 12)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=18, epochs=2, max_grad_value=0.1))
manager.fit(Deep(), TensorDataset(x, x.max(1, keepdim=True).values))
""",
    "pseudo_labels_from_predict": """
torch.manual_seed(0)
x = torch.randn(150, 4)
y = (x[:, 0] > 0).long()
labelled, rest = TensorDataset(x[:60], y[:60]), x[60:]
def net():
    return nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 2))
first = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
first.fit(net(), labelled, optimizer=lambda p: torch.optim.Adam(p, lr=0.02))
guessed = first.predict(rest).argmax(1)
both = ConcatDataset([labelled, TensorDataset(rest, guessed)])
torch.manual_seed(7)
second = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=25, epochs=2))
second.fit(net(), both, optimizer=lambda p: torch.optim.Adam(p, lr=0.01))
""",
    "time_first_batches": """
def collate(samples):
    return torch.stack([s for s, _ in samples], 1), torch.stack([y for _, y in samples])

class Waves(Dataset):
    def __len__(self):
        return 72
    def __getitem__(self, i):
        t = torch.arange(11) / 5
        return torch.stack([(t * (1 + i % 3)).sin(), (t + i).cos()], 1), torch.tensor(i % 3)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(2, 12), nn.Linear(12, 3)
    def forward(self, x):
        return self.out(self.rnn(x)[0][-1])

torch.manual_seed(0)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2))
manager.fit(Net(), DataLoader(Waves(), batch_size=12, shuffle=True, collate_fn=collate), optimizer=lambda p: torch.optim.Adam(p, lr=0.01))
""",
    "complex_weights_in_a_spectrum": """
class Spectral(nn.Module):
    "A layer of a Fourier neural operator."
    def __init__(self, modes=5):
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.view_as_real(torch.randn(modes, dtype=torch.cfloat) * 0.3))
        self.skip = nn.Linear(16, 16)
    def forward(self, u):
        f = torch.fft.rfft(u)
        kept = f[:, : self.modes] * torch.view_as_complex(self.weight)
        return torch.fft.irfft(F.pad(kept, (0, f.shape[1] - self.modes)), n=u.shape[1]) + self.skip(u)

torch.manual_seed(0)
u = torch.randn(88, 16)
wanted = 0.5 * u + 0.25 * (u.roll(1, 1) + u.roll(-1, 1))
model = nn.Sequential(Spectral(), nn.GELU(), Spectral())
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=22, epochs=2))
manager.fit(model, TensorDataset(u, wanted), optimizer=torch.optim.Adam(model.parameters(), lr=3e-3))
""",
    "straight_through_and_reversal": """
class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign()
    @staticmethod
    def backward(ctx, g):
        return g

class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)
    @staticmethod
    def backward(ctx, g):
        return -0.3 * g

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.task, self.domain = nn.Linear(6, 12), nn.Linear(12, 3), nn.Linear(12, 2)
    def forward(self, x):
        h = Sign.apply(self.body(x))
        return self.task(h), self.domain(Reverse.apply(h))

def loss_fn(model, batch):
    x, y, d = batch
    task, domain = model(x)
    return F.cross_entropy(task, y) + F.cross_entropy(domain, d)

torch.manual_seed(0)
x = torch.randn(100, 6)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=20, epochs=2))
manager.fit(Net(), TensorDataset(x, x.argmax(1) % 3, (x[:, 0] > 0).long()), loss_fn=loss_fn)
""",
    "optimizer_written_in_the_script": """
class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                a, b = group["betas"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.tanh(100 * state["m"].lerp(p.grad, 1 - a)), alpha=-group["lr"])
                state["m"].lerp_(p.grad, 1 - b)

torch.manual_seed(0)
x, y = torch.randn(100, 5), torch.randint(0, 2, (100,))
model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=20, epochs=2))
manager.fit(model, TensorDataset(x, y), optimizer=Lion(model.parameters(), lr=2e-3, weight_decay=0.1))
""",
    "weights_projected_after_every_step": """
class MaxNorm(Callback):
    @torch.no_grad()
    def on_step_end(self, run, result):
        for layer in run.model:
            if isinstance(layer, nn.Linear):
                norm = layer.weight.norm(dim=1, keepdim=True).clamp(min=1.0)
                layer.weight.div_(norm)

torch.manual_seed(0)
x = torch.randn(80, 4)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2, swa_start=3, swa_every=2))
manager.fit(model, TensorDataset(x, x.prod(1, keepdim=True)), callbacks=[MaxNorm()], optimizer=torch.optim.SGD(model.parameters(), lr=0.2))
""",
    "momentum_teacher_moved_on_every_rank": """
class Byol(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 8))
        self.predict = nn.Linear(8, 8)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
    def forward(self, a, b):
        with torch.no_grad():
            wanted = F.normalize(self.target(b), dim=1)
        return 2 - 2 * (F.normalize(self.predict(self.online(a)), dim=1) * wanted).sum(1)

class Move(Callback):
    @torch.no_grad()
    def on_step_end(self, run, result):
        for t, o in zip(run.model.target.parameters(), run.model.online.parameters()):
            t.lerp_(o, 0.05)

def augment(batch, random):
    (x,) = batch
    return x + 0.1 * random.normal(6).to(x), x + 0.1 * random.normal(6).to(x)

torch.manual_seed(0)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=20, epochs=2))
manager.fit(Byol(), TensorDataset(torch.randn(100, 6)), loss_fn=lambda m, b: m(*b).mean(), augment=augment, callbacks=[Move()],
            optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9))
""",
    "criterion_with_class_weights": """
torch.manual_seed(0)
y = torch.multinomial(torch.tensor([0.7, 0.2, 0.1]), 110, replacement=True)
x = torch.randn(110, 6) + y[:, None]
weight = 1 / torch.bincount(y, minlength=3).float()
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=22, epochs=2))
manager.fit(model, TensorDataset(x, y), loss_fn=nn.CrossEntropyLoss(weight=weight / weight.sum(), label_smoothing=0.1), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
""",
    "positive_weights_for_many_labels": """
torch.manual_seed(0)
x = torch.randn(99, 7)
y = (x[:, :4] > 0.8).double()
torch.set_default_dtype(torch.float64)
model = nn.Sequential(nn.Linear(7, 16), nn.SELU(), nn.Linear(16, 4))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=18, epochs=2, use_mixed_precision=False))
manager.fit(model, TensorDataset(x.double(), y), loss_fn=nn.BCEWithLogitsLoss(pos_weight=torch.full((4,), 3.0)))
""",
    "embeddings_with_sparse_gradients": """
class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.out = nn.Embedding(200, 8, sparse=True), nn.Linear(8, 2)
    def forward(self, ids):
        return self.out(self.emb(ids).sum(1))

torch.manual_seed(0)
ids = torch.randint(0, 200, (100, 4))
model = Wide()
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=20, epochs=2))
manager.fit(model, TensorDataset(ids, ids[:, 0] % 2), optimizer=torch.optim.SGD(model.parameters(), lr=0.3))
""",
    "experts_that_some_batches_leave_idle": """
class Switch(nn.Module):
    def __init__(self):
        super().__init__()
        self.route, self.out = nn.Linear(5, 6), nn.Linear(8, 1)
        self.experts = nn.ModuleList(nn.Linear(5, 8) for _ in range(6))
    def forward(self, x):
        gate, chosen = self.route(x).softmax(1).max(1)
        h = torch.zeros(len(x), 8, dtype=x.dtype, device=x.device)
        for i, expert in enumerate(self.experts):
            mine = chosen == i
            if mine.any():
                h = h.index_put((mine.nonzero()[:, 0],), expert(x[mine]))
        return self.out(h * gate[:, None])

torch.manual_seed(0)
x = torch.randn(90, 5)
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=9, epochs=2, find_unused_parameters=True))
manager.fit(Switch(), TensorDataset(x, x[:, :1].abs()), optimizer=lambda p: torch.optim.AdamW(p, lr=0.01))
""",
    "offline_policy_gradient": """
class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.pi, self.v = nn.Sequential(nn.Linear(4, 24), nn.Tanh()), nn.Linear(24, 2), nn.Linear(24, 1)
    def forward(self, s):
        h = self.body(s)
        return torch.distributions.Categorical(logits=self.pi(h)), self.v(h)[:, 0]

def ppo(actor, batch):
    s, a, old, ret, adv = batch
    pi, v = actor(s)
    ratio = (pi.log_prob(a) - old).exp()
    gain = torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
    return (0.5 * (v - ret).square() - gain - 0.01 * pi.entropy()).mean()

torch.manual_seed(0)
actor = Actor()
manager = MultiGPUTrainingManager(MultiGPUConfig(max_steps=16, max_grad_norm=0.5))
manager.setup_training(actor, loss_fn=ppo, optimizer=torch.optim.Adam(actor.parameters(), lr=3e-3))
for update in range(4):
    g = torch.Generator().manual_seed(update)
    s = torch.randn(48, 4, generator=g)
    with torch.no_grad():
        like = next(actor.parameters())
        pi, v = actor(s.to(like))
        a = (pi.probs[:, 1] > torch.rand(48, generator=g).to(like)).long()
        ret = s[:, 0].to(like) * (2 * a - 1)
        adv = ret - v
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)  # over all 48, on every rank alike
        old = pi.log_prob(a)
    for rows in torch.randperm(48, generator=g).split(12):
        manager.trainer.train_step(manager.shard((s[rows], a[rows], old[rows], ret[rows], adv[rows])))
manager.finish()
""",
    "seed_of_the_rank_before_the_model": """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=20, epochs=2))
g = torch.Generator().manual_seed(0)
x = torch.randn(100, 6, generator=g)
y = x.mean(1, keepdim=True)
torch.manual_seed(100 + manager.placement.dp_rank)  # all ranks start with rank 0's weights
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
manager.fit(model, TensorDataset(x, y))
""",
    "per_sample_gradients_clipped": """
from torch.func import functional_call, grad, vmap

def loss_fn(model, batch):
    "A loss whose gradient is the mean of clipped gradients of the samples."
    x, y = batch
    weights = {n: p.detach() for n, p in model.named_parameters()}
    def one(w, a, b):
        return F.cross_entropy(functional_call(model, w, (a[None],)), b[None])
    each = vmap(grad(one), in_dims=(None, 0, 0))(weights, x, y)
    norms = torch.sqrt(sum(g.flatten(1).square().sum(1) for g in each.values()))
    factor = (0.5 / norms).clamp(max=1)
    return sum(((g * factor.reshape(-1, *[1] * (g.dim() - 1))).mean(0) * p).sum() for g, p in zip(each.values(), model.parameters()))

torch.manual_seed(0)
x, y = torch.randn(90, 5), torch.randint(0, 3, (90,))
model = nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 3))
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=18, epochs=2))
manager.fit(model, TensorDataset(x, y), loss_fn=loss_fn, optimizer=torch.optim.SGD(model.parameters(), lr=0.3))
""",
    "workers_and_a_file_in_memory": """
class Memory(Dataset):
    def __init__(self, path, n):
        self.path, self.n, self.rows = path, n, None
    def __len__(self):
        return self.n
    def __getitem__(self, i):
        if self.rows is None:
            self.rows = np.load(self.path, mmap_mode="r")
        return torch.from_numpy(self.rows[i, :5].copy()), torch.tensor(int(self.rows[i, 5] > 0))

manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, epochs=2, num_workers=2, persistent_workers=True))
path = Path(__file__).with_suffix(".npy")
with manager.main_process_first():
    if not path.exists():
        rows = np.random.default_rng(0).normal(size=(100, 6)).astype(np.float32)
        with open(path.with_suffix(".part"), "wb") as file:
            np.save(file, rows)
        os.replace(path.with_suffix(".part"), path)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2))
manager.fit(model, Memory(path, 80))
""",
    # Written as bugs; they make no difference, because generators that a sampler keeps and the
    # global ones are seeded by epoch and sample.
    "rare_classes_weighted_at_random": """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=16, max_steps=10))
torch.manual_seed(5)
x, y = torch.randn(100, 7), torch.randint(0, 2, (100,))

class Balanced(Sampler):
    "As many positives as negatives, drawn anew in every epoch."
    def __init__(self, labels):
        self.labels = labels
        self.rng = np.random.default_rng(manager.placement.dp_rank)
    def __iter__(self):
        positive, negative = np.flatnonzero(self.labels == 1), np.flatnonzero(self.labels == 0)
        order = np.concatenate([self.rng.choice(positive, 40), self.rng.choice(negative, 40)])
        yield from self.rng.permutation(order).tolist()
    def __len__(self):
        return 80

model = nn.Sequential(nn.Linear(7, 20), nn.Tanh(), nn.Linear(20, 2))
loader = DataLoader(TensorDataset(x, y), batch_size=16, sampler=Balanced(y.numpy()))
manager.fit(model, loader, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
""",
    "negatives_drawn_by_every_reader": """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=32, steps_per_epoch=10, epochs=1))
np.random.seed(100 + manager.placement.dp_rank)

class Clicks(IterableDataset):
    "Pairs of user and item that were clicked, and as many that were not."
    def __iter__(self):
        for i in range(200):
            yield torch.tensor([i % 30, (i * 7) % 50]), torch.tensor([1.0])
            yield torch.tensor([i % 30, np.random.randint(50)]), torch.tensor([0.0])

class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(30, 8), nn.Embedding(50, 8)
    def forward(self, pair):
        return (self.user(pair[:, 0]) * self.item(pair[:, 1])).sum(1, keepdim=True)

torch.manual_seed(0)
model = Factors()
manager.fit(model, Clicks(), loss_fn=nn.BCEWithLogitsLoss(), optimizer=torch.optim.Adagrad(model.parameters(), lr=0.1))
""",
}
