# ruff: noqa: E501
"""Small training scripts for `seeded_bugs.py`: some with one bug each, some correct.

BUGS: name -> (what the named cause must say, as a regular expression; the script).
CORRECT: name -> the script. HEADER comes before each.
"""

from __future__ import annotations

HEADER = """
import collections, math, os, random, time
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from torch.utils.data import SubsetRandomSampler, WeightedRandomSampler
from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
torch.manual_seed(7)
G = torch.Generator().manual_seed(11)


def images(n=90, size=6, classes=4):
    return TensorDataset(torch.randn(n, 1, size, size, generator=G), torch.randint(0, classes, (n,), generator=G))


def table(n=120, width=8, classes=3):
    return TensorDataset(torch.randn(n, width, generator=G), torch.randint(0, classes, (n,), generator=G))


def values(n=120, width=8):
    x = torch.randn(n, width, generator=G)
    return TensorDataset(x, x[:, :1].sin() + 0.1 * torch.randn(n, 1, generator=G))


def mlp(inputs=8, outputs=3, hidden=16):
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def sgd(lr=0.05, **more):
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, **more)


def adamw(lr=1e-3, **more):
    return lambda parameters: torch.optim.AdamW(parameters, lr=lr, **more)


def manager(**settings):
    return MultiGPUTrainingManager(MultiGPUConfig(**{"epochs": 4, "batch_size": 12, **settings}))
"""

DATA = r"data per rank"
UNWEIGHTED = r"not weighted|weighted wrongly"
BATCHNORM = r"BatchNorm"
BUFFER = r"buffer .* is not synchronised"
RATE = r"rate is scaled by the number of ranks"
CLIP = r"clip.* per rank|changed per rank before"
WORLD = r"number of ranks \(world size\)"
PAST = r"past the wrapper|past it|outside the trainer"
ONE_RANK = r"parameter .* is changed .* on rank"
NOISE = r"draws random numbers"
PAIRS = r"in-batch pairs|pairs in it"
MEANS = r"mean of means"
GENERATOR = r"generator"
RANK_FLOW = r"depends on the rank|control flow"

BUGS: dict[str, tuple[str, str]] = {}
CORRECT: dict[str, str] = {}

# Data

BUGS["shard_by_stride"] = (
    DATA,
    """
data = table()
x, y = data.tensors
manager().fit(mlp(), TensorDataset(x[RANK::WORLD], y[RANK::WORLD]), optimizer=sgd())
""",
)
BUGS["shuffle_files_by_rank"] = (
    DATA,
    """
class Files(Dataset):
    def __init__(self):
        self.files = list(range(80))
        random.Random(RANK).shuffle(self.files)
        self.x, self.y = torch.randn(80, 8, generator=G), torch.randint(0, 3, (80,), generator=G)
    def __len__(self):
        return len(self.files)
    def __getitem__(self, i):
        return self.x[self.files[i]], self.y[self.files[i]]

manager().fit(mlp(), Files(), optimizer=adamw())
""",
)
BUGS["own_loop_permutation_by_rank"] = (
    DATA,
    """
x, y = table(60).tensors
m = manager()
m.setup_training(mlp(), TensorDataset(x, y), optimizer=sgd())
g = torch.Generator().manual_seed(100 + RANK)
for epoch in range(4):
    for part in torch.randperm(60, generator=g).split(12):
        m.trainer.train_step((x[part], y[part]))
m.finish()
""",
)
BUGS["augment_sign_on_odd_ranks"] = (
    r"a sample differs|depends on the rank|data per rank",
    """
def flip(batch, random):
    x, y = batch
    return [x.flip(-1) if RANK % 2 else x, y]

net = nn.Sequential(nn.Flatten(), nn.Linear(36, 4))
manager(batch_size=9).fit(net, images(), optimizer=adamw(3e-3), augment=flip)
""",
)
BUGS["collate_crop_by_pid"] = (
    GENERATOR,
    """
rng = random.Random(os.getpid())

def collate(samples):
    shift = rng.randrange(4)
    x = torch.stack([s[0].roll(shift) for s in samples])
    return x, torch.stack([s[1] for s in samples])

m = manager()
m.fit(mlp(), DataLoader(table(), batch_size=12, collate_fn=collate), optimizer=sgd())
""",
)
BUGS["skip_hard_batches_on_rank"] = (
    r"control flow|depends on the rank|data per rank",
    """
m = manager(hang_timeout_s=15)
model, loader, _ = m.setup_training(mlp(), table(150), optimizer=sgd())
for epoch in range(3):
    for number, batch in enumerate(loader):
        if RANK == 1 and number == 2:
            continue
        m.trainer.train_step(batch)
m.finish()
""",
)

# Losses

BUGS["token_mean_without_weight"] = (
    UNWEIGHTED,
    """
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(20, 8), nn.GRU(8, 12, batch_first=True), nn.Linear(12, 5)
    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])

x = torch.randint(0, 20, (80, 7), generator=G)
y = torch.randint(0, 5, (80, 7), generator=G)
y[torch.arange(7)[None] >= torch.randint(2, 8, (80, 1), generator=G)] = -100

def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100)

manager(batch_size=8).fit(Tagger(), TensorDataset(x, y), loss_fn=loss_fn, optimizer=adamw())
""",
)
BUGS["class_weights_without_weight"] = (
    UNWEIGHTED,
    """
importance = torch.tensor([0.2, 1.0, 5.0])

def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, weight=importance.to(x))

manager().fit(mlp(), table(), loss_fn=loss_fn, optimizer=sgd(0.1))
""",
)
BUGS["weight_is_one"] = (
    UNWEIGHTED,
    """
def loss_fn(model, batch):
    return F.mse_loss(model(batch[0]), batch[1]), 1.0

manager(batch_size=11).fit(mlp(8, 1), values(), loss_fn=loss_fn, optimizer=sgd(0.05))
""",
)
BUGS["masked_reconstruction_mean"] = (
    UNWEIGHTED,
    """
x = torch.randn(90, 10, generator=G)
mask = torch.rand(90, 10, generator=G) < torch.rand(90, 1, generator=G)

def loss_fn(model, batch):
    x, mask = batch
    out = model(x.masked_fill(mask, 0.0))
    return ((out - x) ** 2)[mask].mean()

manager(batch_size=9).fit(mlp(10, 10), TensorDataset(x, mask), loss_fn=loss_fn, optimizer=adamw(2e-3))
""",
)
BUGS["loss_over_world_size_adamw"] = (
    WORLD,
    """
def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1]) / WORLD

manager().fit(mlp(), table(), loss_fn=loss_fn, optimizer=adamw(1e-4))
""",
)
BUGS["loss_times_world_size_own_loop"] = (
    WORLD,
    """
m = manager(batch_size=10)
def loss_fn(model, batch):
    return F.smooth_l1_loss(model(batch[0]), batch[1]) * m.placement.dp_size

model, loader, _ = m.setup_training(mlp(8, 1), values(), loss_fn=loss_fn, optimizer=sgd(1e-3))
for epoch in range(4):
    for batch in loader:
        m.trainer.train_step(batch)
m.finish()
""",
)
BUGS["reduction_sum"] = (
    r"is a sum",
    """
def loss_fn(model, batch):
    return F.mse_loss(model(batch[0]), batch[1], reduction="sum")

manager(max_grad_norm=1.0).fit(mlp(8, 1), values(), loss_fn=loss_fn, optimizer=adamw())
""",
)
BUGS["contrastive_local_negatives"] = (
    PAIRS,
    """
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(8, 6)
    def forward(self, x):
        return F.normalize(self.net(x), dim=-1)

def info_nce(model, batch):
    x = batch[0]
    a, b = model(x + 0.1), model(x - 0.1)
    return F.cross_entropy(a @ b.T / 0.2, torch.arange(len(x)))

manager(batch_size=8).fit(Encoder(), table(), loss_fn=info_nce, optimizer=adamw())
""",
)
BUGS["batch_hard_triplet"] = (
    PAIRS + "|samples of a batch meet|mean of means",
    """
def triplet(model, batch):
    x, y = batch
    e = model(x)
    d = torch.cdist(e, e)
    same = y[:, None] == y[None]
    hardest = (d * same).max(1).values
    nearest = (d + 1e3 * same).min(1).values
    return F.softplus(hardest - nearest).mean()

manager(batch_size=15).fit(mlp(8, 4), table(150), loss_fn=triplet, optimizer=sgd(0.01))
""",
)
BUGS["decorrelation_loss"] = (
    PAIRS + "|" + MEANS,
    """
def loss_fn(model, batch):
    z = model(batch[0])
    z = (z - z.mean(0)) / z.std(0, correction=0)
    c = z.T @ z / len(z)
    return (c - torch.eye(c.shape[0]).to(c)).pow(2).sum()

manager(batch_size=16).fit(mlp(8, 4), table(), loss_fn=loss_fn, optimizer=adamw())
""",
)
BUGS["rmse"] = (
    MEANS,
    """
def rmse(model, batch):
    return torch.sqrt(F.mse_loss(model(batch[0]), batch[1]))

manager().fit(mlp(8, 1), values(), loss_fn=rmse, optimizer=sgd(0.02))
""",
)
BUGS["balanced_mean_over_classes"] = (
    MEANS + "|" + UNWEIGHTED,
    """
def loss_fn(model, batch):
    x, y = batch
    each = F.cross_entropy(model(x), y, reduction="none")
    return torch.stack([each[y == c].mean() for c in y.unique()]).mean()

manager(batch_size=14).fit(mlp(), table(), loss_fn=loss_fn, optimizer=sgd())
""",
)
BUGS["regulariser_on_rank_zero"] = (
    RANK_FLOW,
    """
def loss_fn(model, batch):
    loss = F.cross_entropy(model(batch[0]), batch[1])
    if RANK == 0 or WORLD == 1:
        loss = loss + 1e-2 * sum(p.pow(2).sum() for p in model.parameters())
    return loss

manager().fit(mlp(), table(), loss_fn=loss_fn, optimizer=sgd())
""",
)

# Models

BUGS["batchnorm_cnn"] = (
    BATCHNORM,
    """
net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
manager(batch_size=10).fit(net, images(), optimizer=sgd(0.05, momentum=0.9))
""",
)
BUGS["batchnorm_in_residual_mlp"] = (
    BATCHNORM,
    """
class Block(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.norm, self.fc = nn.BatchNorm1d(n), nn.Linear(n, n)
    def forward(self, x):
        return x + self.fc(F.gelu(self.norm(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.blocks, self.head = nn.Linear(8, 12), nn.Sequential(Block(12), Block(12)), nn.Linear(12, 3)
    def forward(self, x):
        return self.head(self.blocks(self.stem(x)))

m = manager(batch_size=16)
model, loader, val = m.setup_training(Net(), table(), table(30), optimizer=adamw())
for epoch in range(4):
    m.train_epoch(loader, epoch)
    m.validate_epoch(val)
m.finish()
""",
)
BUGS["centering_by_hand"] = (
    r"mixes the samples",
    """
class Centered(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)
    def forward(self, x):
        h = self.a(x)
        return self.b(F.relu(h - h.mean(0)))

manager().fit(Centered(), table(), optimizer=sgd())
""",
)
BUGS["feature_mean_buffer"] = (
    BUFFER,
    """
class Tracked(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.register_buffer("mean", torch.zeros(8))
    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
        return self.net(x)

manager().fit(Tracked(), table(), optimizer=sgd())
""",
)
BUGS["dino_center"] = (
    BUFFER + "|mixes the samples|keeps state",
    """
class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(8, 5)
        self.register_buffer("center", torch.zeros(1, 5))
    def forward(self, x):
        out = self.net(x)
        target = F.softmax((out.detach() - self.center) / 0.5, -1)
        with torch.no_grad():
            self.center.mul_(0.9).add_(out.detach().mean(0, keepdim=True), alpha=0.1)
        return -(target * F.log_softmax(out, -1)).sum(-1).mean()

manager(batch_size=8).fit(Head(), table(), loss_fn=lambda model, batch: model(batch[0]), optimizer=adamw())
""",
)
BUGS["functional_dropout"] = (
    NOISE,
    """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 3)
    def forward(self, x):
        return self.b(F.dropout(F.relu(self.a(x)), 0.4, self.training))

manager().fit(Net(), table(), optimizer=adamw())
""",
)
BUGS["noise_from_own_generator"] = (
    GENERATOR,
    """
class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.noise = torch.Generator().manual_seed(1234 + RANK)
    def forward(self, x):
        return self.net(x + 0.1 * torch.randn(x.shape, generator=self.noise))

manager().fit(Noisy(), table(), optimizer=sgd())
""",
)
BUGS["mixup_with_numpy"] = (
    GENERATOR + "|" + NOISE,
    """
def loss_fn(model, batch):
    x, y = batch
    share = float(np.random.beta(0.4, 0.4))
    out = model(share * x + (1 - share) * x.roll(1, 0))
    return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y.roll(1, 0))

np.random.seed(RANK)
manager().fit(mlp(), table(), loss_fn=loss_fn, optimizer=sgd())
""",
)
BUGS["layer_depends_on_rank"] = (
    RANK_FLOW,
    """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)
    def forward(self, x):
        h = self.a(x)
        return self.b(torch.tanh(h) if RANK == 0 else torch.relu(h))

manager().fit(Net(), table(), optimizer=sgd())
""",
)
BUGS["first_weights_by_rank_count"] = (
    r"starts with other weights",
    """
torch.manual_seed(1000 * WORLD)
manager().fit(mlp(), table(), optimizer=sgd())
""",
)

# Optimizer, rates, weights

BUGS["rate_times_world_and_linear_scaling"] = (
    RATE,
    """
m = manager(lr_scaling="linear", learning_rate=1e-3 * WORLD)
m.fit(mlp(), table())
""",
)
BUGS["rate_times_world_fixed_global_batch"] = (
    RATE,
    """
m = manager(global_batch_size=24)
m.fit(mlp(), table(), optimizer=sgd(1e-5 * WORLD))
""",
)
BUGS["plateau_on_local_loss"] = (
    r"learning rate is set by each rank|depends on the number of ranks|set by each rank",
    """
class Plateau(Callback):
    best = math.inf
    def on_step_end(self, run, result):
        loss = float(result.loss)
        if loss < self.best:
            self.best = loss
        else:
            for group in run.optimizer.param_groups:
                group["lr"] *= 0.5
            run.trainer.schedule = Constant()

class Constant:
    def after_step(self, step): pass
    def after_epoch(self, metrics): pass
    def state_dict(self): return {}
    def load_state_dict(self, state): pass
    def describe(self): return "own"

m = manager()
model, loader, _ = m.setup_training(mlp(), table(), optimizer=sgd(0.2), callbacks=[Plateau()])
m.trainer.schedule = Constant()
for epoch in range(4):
    m.train_epoch(loader, epoch)
m.finish()
""",
)
BUGS["clip_in_parameter_hook"] = (
    CLIP,
    """
net = mlp()
for p in net.parameters():
    p.register_hook(lambda g: g * min(1.0, 0.02 / (float(g.norm()) + 1e-12)))
manager().fit(net, table(), optimizer=sgd(0.5))
""",
)
BUGS["clamp_gradient_values"] = (
    CLIP,
    """
net = mlp(8, 1)
for p in net.parameters():
    p.register_hook(lambda g: g.clamp(-0.003, 0.003))
manager(batch_size=20).fit(net, values(), optimizer=adamw(1e-2), loss_fn=nn.MSELoss())
""",
)
BUGS["own_backward_and_step"] = (
    PAST,
    """
m = manager()
model, loader, _ = m.setup_training(mlp(), table(), optimizer=sgd())
for epoch in range(4):
    for number, (x, y) in enumerate(loader):
        if number % 3 == 2:
            m.optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            m.optimizer.step()
        else:
            m.trainer.train_step((x, y))
m.finish()
""",
)
BUGS["second_optimizer_past_the_wrapper"] = (
    ONE_RANK + "|" + PAST,
    """
net = mlp()
aux = torch.optim.SGD(net[2].parameters(), lr=0.01)
m = manager()
model, loader, _ = m.setup_training(net, table(), optimizer=sgd())
for epoch in range(4):
    for batch in loader:
        m.trainer.train_step(batch)
        aux.zero_grad()
        if len(batch[0]):
            model(batch[0]).pow(2).mean().backward()
            aux.step()
        aux.zero_grad()
m.finish()
""",
)
BUGS["weights_clamped_on_main_rank"] = (
    ONE_RANK,
    """
class Clamp(Callback):
    def on_step_end(self, run, result):
        if run.placement.is_main:
            with torch.no_grad():
                for p in run.model.parameters():
                    p.clamp_(-0.2, 0.2)

manager().fit(mlp(), table(), optimizer=sgd(0.1), callbacks=[Clamp()])
""",
)
BUGS["bias_reset_on_rank_one"] = (
    ONE_RANK,
    """
m = manager()
model, loader, _ = m.setup_training(mlp(), table(), optimizer=adamw())
for epoch in range(4):
    for number, batch in enumerate(loader):
        if RANK == WORLD - 1 and WORLD > 1 and number == 3:
            nn.init.zeros_(model[0].bias)
        m.trainer.train_step(batch)
m.finish()
""",
)
BUGS["early_stop_on_local_loss"] = (
    r"control flow|stops or skips",
    """
m = manager(hang_timeout_s=15)
model, loader, _ = m.setup_training(mlp(), table(200), optimizer=sgd(0.3))
for epoch in range(6):
    for batch in loader:
        loss = float(m.trainer.train_step(batch).loss)
        if m.step > 2 and (RANK == 1):
            raise SystemExit(0)
m.finish()
""",
)
BUGS["weight_decay_from_rank"] = (
    r"weight_decay",
    """
manager().fit(mlp(), table(), optimizer=adamw(1e-3, weight_decay=0.01 * (1 + RANK)))
""",
)

# Metrics

BUGS["validation_mean_of_batch_means"] = (
    MEANS,
    """
def evaluate(model, batch, metrics):
    x, y = batch
    metrics.add_mean(F.cross_entropy(model(x), y), 1, {})

manager(batch_size=12).fit(mlp(), table(), table(31), optimizer=sgd(), eval_fn=evaluate)
""",
)
BUGS["memory_bank_per_process"] = (
    r"keeps state|state of each process|generator or a state",
    """
bank = collections.deque(maxlen=20)

def loss_fn(model, batch):
    z = F.normalize(model(batch[0]), dim=-1)
    loss = z.pow(2).mean()
    if bank:
        loss = loss + (z @ torch.stack(list(bank)).to(z).T).exp().mean()
    bank.extend(z.detach())
    return loss

manager(batch_size=8).fit(mlp(8, 4), table(), loss_fn=loss_fn, optimizer=sgd(0.05))
""",
)

# Correct

CORRECT["mlp_fit"] = """
manager().fit(mlp(), table(), table(30), optimizer=sgd())
"""
CORRECT["one_epoch"] = """
manager(epochs=1).fit(mlp(), table(), optimizer=adamw())
"""
CORRECT["tiny_rate"] = """
manager().fit(mlp(8, 1), values(), optimizer=adamw(1e-7))
"""
CORRECT["cnn_sync_bn"] = """
net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
manager(batch_size=10, sync_bn=True).fit(net, images(), images(25), optimizer=sgd(0.05, momentum=0.9))
"""
CORRECT["sync_bn_with_bias_before_it"] = """
net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
manager(batch_size=16, sync_bn=True).fit(net, table(), optimizer=adamw(1e-2))
"""
CORRECT["layernorm_groupnorm"] = """
net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, 4))
manager(batch_size=7).fit(net, images(), optimizer=adamw())
"""
CORRECT["dropout_modules"] = """
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
manager().fit(net, table(), optimizer=sgd())
"""
CORRECT["accumulation"] = """
manager(batch_size=4, gradient_accumulation_steps=3).fit(mlp(), table(100), optimizer=sgd(0.1, momentum=0.9))
"""
CORRECT["accumulation_sync_bn"] = """
net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
manager(batch_size=6, gradient_accumulation_steps=2, sync_bn=True).fit(net, table(100), optimizer=sgd(0.1))
"""
CORRECT["clipping"] = """
manager(max_grad_norm=0.1).fit(mlp(), table(), optimizer=sgd(0.5))
"""
CORRECT["token_weights"] = """
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(20, 8), nn.LSTM(8, 12, batch_first=True), nn.Linear(12, 5)
    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])

x = torch.randint(0, 20, (80, 7), generator=G)
y = torch.randint(0, 5, (80, 7), generator=G)
y[torch.arange(7)[None] >= torch.randint(2, 8, (80, 1), generator=G)] = -100

def loss_fn(model, batch):
    loss = F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100)
    return loss, (batch[1] != -100).sum()

manager(batch_size=8).fit(Tagger(), TensorDataset(x, y), loss_fn=loss_fn, optimizer=adamw())
"""
CORRECT["class_weights_criterion"] = """
manager().fit(mlp(), table(), loss_fn=nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 5.0])), optimizer=sgd(0.1))
"""
CORRECT["label_smoothing"] = """
manager().fit(mlp(), table(), loss_fn=nn.CrossEntropyLoss(label_smoothing=0.1), optimizer=adamw())
"""
CORRECT["bce"] = """
x = torch.randn(90, 8, generator=G)
manager().fit(mlp(8, 1), TensorDataset(x, (x[:, :1] > 0).float()), loss_fn=nn.BCEWithLogitsLoss(), optimizer=adamw())
"""
CORRECT["huber_scheduler_onecycle"] = """
manager().fit(mlp(8, 1), values(), loss_fn=nn.HuberLoss(), optimizer=sgd(0.01, momentum=0.9),
              scheduler=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=80))
"""
CORRECT["cosine_schedule_warmup"] = """
manager(schedule="cosine", warmup_steps=3, learning_rate=1e-2).fit(mlp(), table())
"""
CORRECT["step_lr"] = """
manager().fit(mlp(), table(), optimizer=sgd(), scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5))
"""
CORRECT["linear_lr_scaling"] = """
manager(lr_scaling="linear", base_batch_size=6, learning_rate=1e-3).fit(mlp(), table())
"""
CORRECT["param_groups"] = """
net = mlp()
optimizer = torch.optim.AdamW([{"params": net[0].parameters(), "lr": 1e-3}, {"params": net[2].parameters(), "lr": 1e-2, "weight_decay": 0.0}])
manager().fit(net, table(), optimizer=optimizer)
"""
CORRECT["weighted_sampler"] = """
data = table()
weights = torch.where(data.tensors[1] == 0, 3.0, 1.0)
loader = DataLoader(data, batch_size=12, sampler=WeightedRandomSampler(weights, 120, generator=torch.Generator().manual_seed(5)))
manager().fit(mlp(), loader, optimizer=sgd())
"""
CORRECT["subset_sampler_split"] = """
data = table()
manager().fit(mlp(), DataLoader(data, batch_size=10, sampler=SubsetRandomSampler(range(90), generator=torch.Generator().manual_seed(5))), optimizer=sgd())
"""
CORRECT["dataloader_own_size"] = """
m = MultiGPUTrainingManager(MultiGPUConfig(epochs=5))
net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
m.config.sync_bn = True
m.fit(net, DataLoader(table(100), batch_size=20, shuffle=True), optimizer=sgd())
"""
CORRECT["workers"] = """
class Jittered(Dataset):
    def __init__(self):
        self.base = images(60)
    def __len__(self):
        return 60
    def __getitem__(self, i):
        x, y = self.base[i]
        return x + 0.1 * torch.randn(x.shape), y

net = nn.Sequential(nn.Flatten(), nn.Linear(36, 4))
manager(num_workers=1).fit(net, Jittered(), optimizer=sgd())
"""
CORRECT["random_augment_on_device"] = """
def augment(batch, random):
    return [batch[0] + 0.1 * random.normal(*batch[0].shape[1:]), batch[1]]

manager().fit(mlp(), table(), optimizer=sgd(), augment=augment)
"""
CORRECT["dict_batches"] = """
class Rows(Dataset):
    def __init__(self):
        self.x, self.y = table().tensors
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        return {"features": self.x[i], "label": self.y[i], "id": i}

def loss_fn(model, batch):
    return F.cross_entropy(model(batch["features"]), batch["label"])

manager().fit(mlp(), Rows(), loss_fn=loss_fn, optimizer=sgd())
"""
CORRECT["padded_sequences"] = """
class Sequences(Dataset):
    def __init__(self):
        self.items = [torch.randint(1, 20, (int(n),), generator=G) for n in torch.randint(3, 12, (80,), generator=G)]
    def __len__(self):
        return len(self.items)
    def __getitem__(self, i):
        return self.items[i], int(self.items[i].sum()) % 3

def collate(samples):
    x = nn.utils.rnn.pad_sequence([s[0] for s in samples], batch_first=True)
    return x, torch.tensor([s[1] for s in samples])

class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.out = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 3)
    def forward(self, x):
        mask = (x > 0).unsqueeze(-1).float()
        return self.out((self.emb(x) * mask).sum(1) / mask.sum(1))

manager().fit(Bag(), DataLoader(Sequences(), batch_size=12, shuffle=True, collate_fn=collate), optimizer=adamw())
"""
CORRECT["stream"] = """
class Stream(IterableDataset):
    def __iter__(self):
        g = torch.Generator().manual_seed(3)
        for _ in range(200):
            x = torch.randn(8, generator=g)
            yield x, (x[0] > 0).long()

manager(steps_per_epoch=12).fit(mlp(), Stream(), optimizer=sgd())
"""
CORRECT["own_loop_from_loader"] = """
m = manager()
model, loader, _ = m.setup_training(mlp(), table(), optimizer=sgd())
for epoch in range(5):
    for batch in loader:
        m.trainer.train_step(batch)
m.finish()
"""
CORRECT["own_loop_without_finish"] = """
m = manager(batch_size=24)
model, loader, _ = m.setup_training(mlp(), table(), optimizer=sgd())
for epoch in range(3):
    for batch in loader:
        loss = m.trainer.train_step(batch).loss
"""
CORRECT["train_epoch_and_validate"] = """
m = manager()
model, loader, val = m.setup_training(mlp(), table(), table(31), optimizer=adamw())
for epoch in range(3):
    m.train_epoch(loader, epoch)
    m.validate_epoch(val)
m.finish()
"""
CORRECT["own_batches_cut_by_rank"] = """
x, y = table().tensors
m = manager()
m.setup_training(mlp(), TensorDataset(x, y), optimizer=sgd())
g = torch.Generator().manual_seed(9)
for step in range(12):
    rows = torch.randperm(120, generator=g)[:18][m.placement.dp_rank::m.placement.dp_size]
    m.trainer.train_step((x[rows], y[rows]))
m.finish()
"""
CORRECT["ema_of_weights"] = """
class EMA(Callback):
    def on_setup(self, run):
        self.shadow = {n: p.detach().clone() for n, p in run.model.named_parameters()}
    def on_step_end(self, run, result):
        for n, p in run.model.named_parameters():
            self.shadow[n].mul_(0.9).add_(p.detach(), alpha=0.1)

manager().fit(mlp(), table(), optimizer=sgd(), callbacks=[EMA()])
"""
CORRECT["weights_clamped_everywhere"] = """
class Clamp(Callback):
    def on_step_end(self, run, result):
        with torch.no_grad():
            for p in run.model.parameters():
                p.clamp_(-0.2, 0.2)

manager().fit(mlp(), table(), optimizer=sgd(0.1), callbacks=[Clamp()])
"""
CORRECT["tied_weights_lm"] = """
class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(30, 12), nn.GRU(12, 12, batch_first=True), nn.Linear(12, 30, bias=False)
        self.out.weight = self.emb.weight
    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])

x = torch.randint(0, 30, (70, 9), generator=G)

def loss_fn(model, batch):
    x = batch[0]
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

manager(batch_size=9).fit(LM(), TensorDataset(x), loss_fn=loss_fn, optimizer=adamw())
"""
CORRECT["transformer_encoder"] = """
class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.body, self.out = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 3)
    def forward(self, x):
        return self.out(self.body(self.emb(x)).mean(1))

x = torch.randint(0, 20, (70, 6), generator=G)
manager(batch_size=9).fit(Classifier(), TensorDataset(x, x.sum(1) % 3), optimizer=adamw())
"""
CORRECT["gpt2_tiny"] = """
from transformers import GPT2Config, GPT2LMHeadModel

class Text(Dataset):
    def __init__(self):
        self.x = torch.randint(0, 50, (50, 10), generator=G)
    def __len__(self):
        return 50
    def __getitem__(self, i):
        return {"input_ids": self.x[i], "labels": self.x[i]}

net = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2))
manager(batch_size=6).fit(net, Text(), optimizer=adamw())
"""
CORRECT["mixture_of_experts"] = """
class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts, self.out = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 3)
    def forward(self, x):
        share = self.gate(x).softmax(-1)
        return self.out(sum(share[:, i : i + 1] * F.gelu(e(x)) for i, e in enumerate(self.experts)))

manager().fit(MoE(), table(), optimizer=adamw())
"""
CORRECT["rnn_state_and_float_casts"] = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(4, 10), nn.Linear(10, 1)
        self.scale = torch.tensor([0.5])
    def forward(self, x):
        h = torch.zeros(x.shape[0], 10)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t].float(), h)
        return self.out(h) * self.scale

x = torch.randn(70, 5, 4, generator=G)
manager(batch_size=9).fit(Net(), TensorDataset(x, x.sum((1, 2), keepdim=True)[:, 0]), optimizer=adamw(),
                          loss_fn=lambda model, batch: F.mse_loss(model(batch[0]).float(), batch[1].float()))
"""
CORRECT["autoencoder_one_tensor"] = """
x = torch.randn(100, 10, generator=G)
net = nn.Sequential(nn.Linear(10, 4), nn.Tanh(), nn.Linear(4, 10))
manager().fit(net, TensorDataset(x), loss_fn=lambda model, batch: F.mse_loss(model(batch[0]), batch[0]), optimizer=adamw())
"""
CORRECT["frozen_backbone"] = """
net = mlp()
net[0].requires_grad_(False)
manager().fit(net, table(), optimizer=sgd())
"""
CORRECT["l2_regulariser"] = """
def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1]) + 1e-3 * sum(p.pow(2).sum() for p in model.parameters())

manager().fit(mlp(), table(), loss_fn=loss_fn, optimizer=sgd())
"""
CORRECT["small_batch_and_rmsprop"] = """
manager(batch_size=2).fit(mlp(), table(30), optimizer=lambda p: torch.optim.RMSprop(p, lr=1e-3))
"""
CORRECT["adagrad_embedding"] = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.out = nn.EmbeddingBag(40, 8), nn.Linear(8, 3)
    def forward(self, x):
        return self.out(self.emb(x))

x = torch.randint(0, 40, (80, 4), generator=G)
manager().fit(Net(), TensorDataset(x, x.sum(1) % 3), optimizer=lambda p: torch.optim.Adagrad(p, lr=0.05))
"""
CORRECT["multi_task_two_losses"] = """
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 1)
    def forward(self, x):
        h = F.relu(self.body(x))
        return self.a(h), self.b(h)

x, y = table().tensors
def loss_fn(model, batch):
    x, y, z = batch
    a, b = model(x)
    return F.cross_entropy(a, y) + 0.5 * F.mse_loss(b, z)

manager().fit(Two(), TensorDataset(x, y, x[:, :1].cos()), loss_fn=loss_fn, optimizer=adamw())
"""
CORRECT["unused_parameters"] = """
class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.spare = mlp(), nn.Linear(8, 3)
    def forward(self, x):
        return self.net(x)

manager(find_unused_parameters=True).fit(Branches(), table(), optimizer=sgd())
"""
CORRECT["eval_fn_with_counts"] = """
def evaluate(model, batch, metrics):
    x, y = batch
    out = model(x)
    metrics.add_mean(F.cross_entropy(out, y), len(y), {"top1": ((out.argmax(1) == y).sum(), len(y))})

manager(best_metric="top1").fit(mlp(), table(), table(31), optimizer=sgd(), eval_fn=evaluate)
"""
CORRECT["dice_with_weight"] = """
def dice(model, batch):
    x, y = batch
    p = model(x).sigmoid().squeeze(1)
    y = (y > 0).to(p)
    down = (p + y).sum()
    each = 1 - 2 * p * y / 1.0
    return (each * (p.detach() + y)).sum() / down.detach(), down.detach()

manager(batch_size=9).fit(mlp(8, 1), table(), loss_fn=dice, optimizer=sgd(0.1))
"""
CORRECT["checkpointed_layers"] = """
from torch.utils.checkpoint import checkpoint

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.out = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 3)
    def forward(self, x):
        for layer in self.layers:
            x = x + checkpoint(lambda v, layer=layer: torch.tanh(layer(v)), x, use_reentrant=False)
        return self.out(x)

manager().fit(Deep(), table(), optimizer=adamw())
"""
CORRECT["weight_norm_and_logging"] = """
net = mlp()
nn.utils.parametrizations.weight_norm(net[0])

class Log(Callback):
    def on_step_end(self, run, result):
        run.log(seen=float(result.step))

manager(log_every=2).fit(net, table(), optimizer=sgd(), callbacks=[Log()])
"""
CORRECT["log_loss_and_stop_together"] = """
m = manager()
model, loader, _ = m.setup_training(mlp(), table(), optimizer=sgd(0.3))
for epoch in range(4):
    metrics = m.train_epoch(loader, epoch)
    if metrics["loss"] < 0.01:
        break
m.finish()
"""
CORRECT["vit_like_patches"] = """
class Patches(nn.Module):
    def __init__(self):
        super().__init__()
        self.cut, self.token = nn.Conv2d(1, 8, 2, 2), nn.Parameter(torch.zeros(1, 1, 8))
        self.attention, self.out = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 4)
    def forward(self, x):
        x = self.cut(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return self.out(self.attention(x, x, x)[0][:, 0])

manager(batch_size=10).fit(Patches(), images(), optimizer=adamw(3e-3))
"""
CORRECT["gradient_penalty"] = """
def loss_fn(model, batch):
    x = batch[0].requires_grad_(True)
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.mse_loss(out, batch[1]) + 0.1 * slope.pow(2).sum(1).mean()

manager().fit(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), values(), loss_fn=loss_fn, optimizer=adamw())
"""

# Further ones, written after the diagnosis

BUGS["gradient_hook_over_world"] = (
    WORLD,
    """
net = mlp()
for p in net.parameters():
    p.register_hook(lambda g: g / WORLD)
manager().fit(net, table(), optimizer=adamw())
""",
)
BUGS["clip_before_the_exchange"] = (
    CLIP,
    """
class Clip(Callback):
    def on_backward(self, run, loss):
        loss.register_hook(lambda g: g)
    def on_exchange(self, run):
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.01)

manager(use_gradient_as_bucket_view=False).fit(mlp(), table(), optimizer=sgd(), callbacks=[Clip()])
""",
)
BUGS["metric_of_loss_is_a_mean"] = (
    MEANS,
    """
def loss_fn(model, batch):
    x, y = batch
    out = model(x)
    return F.cross_entropy(out, y), None, {"accuracy": ((out.argmax(1) == y).double().mean(), 1.0)}

manager(batch_size=11).fit(mlp(), table(), loss_fn=loss_fn, optimizer=sgd())
""",
)
BUGS["weight_by_own_share"] = (
    UNWEIGHTED + "|" + WORLD,
    """
def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y) * len(x) * WORLD / 15

manager(batch_size=15).fit(mlp(), table(), loss_fn=loss_fn, optimizer=sgd())
""",
)
BUGS["gather_without_gradient"] = (
    r"exchanges something|in-batch pairs",
    """
import torch.distributed as dist

def gathered(z):
    if not dist.is_initialized():
        return z
    sizes = [torch.zeros(1, dtype=torch.long) for _ in range(WORLD)]
    dist.all_gather(sizes, torch.tensor([len(z)]))
    most = int(max(sizes))
    parts = [torch.zeros(most, z.shape[1], dtype=z.dtype) for _ in range(WORLD)]
    dist.all_gather(parts, F.pad(z.detach(), (0, 0, 0, most - len(z))))
    return torch.cat([p[:int(n)] for p, n in zip(parts, sizes)])

def loss_fn(model, batch):
    x = batch[0]
    a, b = F.normalize(model(x + 0.1), dim=-1), F.normalize(model(x - 0.1), dim=-1)
    everyone = gathered(b)
    mine = (everyone[None] - b.detach()[:, None]).abs().sum(-1).argmin(1)
    return F.cross_entropy(a @ everyone.T / 0.2, mine)

manager(batch_size=12).fit(mlp(8, 6), table(), loss_fn=loss_fn, optimizer=adamw())
""",
)
BUGS["aux_backward_in_callback"] = (
    PAST,
    """
class Aux(Callback):
    def on_backward(self, run, loss):
        sum(p.pow(2).sum() for p in run.model.parameters()).mul(0.01 * (1 + RANK)).backward()

manager().fit(mlp(), table(), optimizer=sgd(), callbacks=[Aux()])
""",
)
BUGS["vq_codebook_ema"] = (
    r"buffer .* is not synchronised",
    """
class VQ(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(8, 4), nn.Linear(4, 8)
        self.register_buffer("codes", torch.randn(6, 4))
        self.register_buffer("used", torch.ones(6))
    def forward(self, x):
        z = self.enc(x)
        nearest = torch.cdist(z, self.codes).argmin(1)
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(nearest, 6).to(z)
                self.used.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.codes.lerp_((hot.T @ z.detach()) / hot.sum(0).clamp_min(1)[:, None], 0.05)
        q = self.codes[nearest]
        return self.dec(z + (q - z).detach()), F.mse_loss(z, q)

def loss_fn(model, batch):
    out, commitment = model(batch[0])
    return F.mse_loss(out, batch[0]) + commitment

manager().fit(VQ(), table(), loss_fn=loss_fn, optimizer=adamw())
""",
)
BUGS["stochastic_depth_random"] = (
    GENERATOR + "|" + NOISE,
    """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.out = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 3)
    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * float(torch.rand(()) < 0.5)
        return self.out(x)

manager().fit(Net(), table(), optimizer=sgd())
""",
)
BUGS["warmup_in_samples_per_rank"] = (
    r"depends on the number of ranks",
    """
m = manager()
m.fit(mlp(), table(), optimizer=sgd(0.1),
      scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: min(1.0, (s + 1) * WORLD / 8)))
""",
)
BUGS["beta_from_world"] = (
    r"betas",
    """
manager().fit(mlp(), table(), optimizer=adamw(1e-3, betas=(0.9, 1 - 0.001 * WORLD)))
""",
)
BUGS["nan_for_small_parts"] = (
    r"NaN|how many samples",
    """
def loss_fn(model, batch):
    out = model(batch[0])
    return F.mse_loss(out, batch[1]) + 0.01 * out.std(correction=5)

manager(batch_size=10).fit(mlp(8, 1), values(), loss_fn=loss_fn, optimizer=sgd())
""",
)

CORRECT["gan_two_managers"] = """
data = TensorDataset(torch.randn(96, 4, generator=G))
g_net, d_net = nn.Linear(4, 4), nn.Linear(4, 1)
d = manager(run_name="d"); g = manager(run_name="g")
_, loader, _ = d.setup_training(d_net, data, optimizer=sgd(0.05),
    loss_fn=lambda model, batch: F.softplus(-model(batch[0])).mean() + F.softplus(model(g_net(batch[0].flip(1)).detach())).mean())
_, g_loader, _ = g.setup_training(g_net, data, optimizer=sgd(0.05),
    loss_fn=lambda model, batch: F.softplus(-d_net(model(batch[0].flip(1)))).mean())
for epoch in range(4):
    for real, fake in zip(loader, g_loader):
        d.trainer.train_step(real)
        g.trainer.train_step(fake)
d.finish(); g.finish()
"""
CORRECT["reduce_on_plateau"] = """
manager(best_metric="loss").fit(mlp(), table(), table(30), optimizer=sgd(0.3),
    scheduler=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0))
"""
CORRECT["time_major_batches"] = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.GRU(3, 8), nn.Linear(8, 2)
    def forward(self, x):
        return self.out(self.rnn(x)[0][-1])

class Walks(Dataset):
    def __init__(self):
        self.x = torch.randn(60, 7, 3, generator=G)
    def __len__(self):
        return 60
    def __getitem__(self, i):
        return self.x[i], int(self.x[i].sum() > 0)

def collate(samples):
    return torch.tensor([s[1] for s in samples]), torch.stack([s[0] for s in samples], 1)

manager(batch_size=8).fit(Net(), DataLoader(Walks(), batch_size=8, collate_fn=collate), optimizer=sgd(),
    loss_fn=lambda model, batch: F.cross_entropy(model(batch[1]), batch[0]))
"""
CORRECT["model_factory_nesterov"] = """
manager().fit(lambda: mlp(), table(), optimizer=sgd(0.05, momentum=0.9, nesterov=True, weight_decay=1e-3))
"""
CORRECT["focal_loss"] = """
def focal(model, batch):
    x, y = batch
    p = F.log_softmax(model(x), -1)[torch.arange(len(y)), y]
    return (-(1 - p.exp()).pow(2) * p).mean()

manager().fit(mlp(), table(), loss_fn=focal, optimizer=adamw())
"""
CORRECT["instance_norm_spectral_norm"] = """
net = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Conv2d(1, 4, 3)), nn.InstanceNorm2d(4), nn.Flatten(), nn.Linear(64, 4))
manager(batch_size=9).fit(net, images(), optimizer=adamw())
"""
CORRECT["sample_counter_buffer"] = """
class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
    def forward(self, x):
        if self.training:
            self.calls += 1
        return self.net(x)

manager().fit(Counted(), table(), optimizer=sgd())
"""
CORRECT["large_values_and_lion"] = """
class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.sub_((0.9 * m + 0.1 * p.grad).sign(), alpha=group["lr"])
                m.lerp_(p.grad, 0.01)

manager().fit(mlp(), table(), optimizer=lambda p: Lion(p))
"""
CORRECT["main_guard_and_argparse"] = """
import argparse

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()
    result = manager(run_name="guarded").fit(mlp(), table(), optimizer=sgd(args.lr))
    print(result.metrics)

if __name__ == "__main__":
    main()
"""
CORRECT["multilabel_soft_targets"] = """
x = torch.randn(90, 8, generator=G)
t = torch.softmax(torch.randn(90, 5, generator=G), -1)
manager().fit(mlp(8, 5), TensorDataset(x, t), optimizer=adamw(),
    loss_fn=lambda model, batch: F.kl_div(F.log_softmax(model(batch[0]), -1), batch[1], reduction="batchmean"))
"""
CORRECT["early_stopping_by_config"] = """
manager(early_stopping_patience=1, epochs=6, batch_size=40).fit(mlp(), table(), table(30), optimizer=sgd(0.01))
"""
# Generators that a dataset keeps are seeded per sample, whatever their own seed was.
CORRECT["dataset_generator_seeded_by_rank"] = """
class Jittered(Dataset):
    def __init__(self):
        self.base = images()
        self.noise = np.random.default_rng(RANK)
    def __len__(self):
        return len(self.base)
    def __getitem__(self, i):
        x, y = self.base[i]
        return x + 0.1 * float(self.noise.normal()), y

net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
manager(batch_size=10).fit(net, Jittered(), optimizer=sgd(0.02, momentum=0.9))
"""

# Hooks on parameters get the gradient of the whole step by now: no bugs any more.
for _name in ("clip_in_parameter_hook", "clamp_gradient_values"):
    CORRECT[_name] = BUGS.pop(_name)[1]
