# ruff: noqa: E501
"""Scripts for `seeded_bugs.py` that were written after the diagnosis, without changing it.

As in the other files: BUGS maps a name to what the cause must say and to the script, CORRECT a name to the script.
"""

from __future__ import annotations

HEADER = """
import collections, copy, functools, math, os, random
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import *
from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
torch.manual_seed(13)
X, Y = torch.randn(110, 6), torch.randint(0, 4, (110,))
TARGET = X[:, :2].cos().sum(1, keepdim=True)

def net(out=4, *middle):
    return nn.Sequential(nn.Linear(6, 12), *middle, nn.GELU(), nn.Linear(12, out))

def fit(model, data, loss_fn=None, optimizer=None, val=None, callbacks=(), scheduler=None, augment=None, **settings):
    config = MultiGPUConfig(**{"global_batch_size": 14, "epochs": 3, **settings})
    optimizer = optimizer or (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8))
    return MultiGPUTrainingManager(config).fit(model, data, val, loss_fn=loss_fn, optimizer=optimizer, callbacks=callbacks, scheduler=scheduler, augment=augment)
"""

WHOLE = r"over the batch as a whole|in-batch pairs|mean of means|mixes the samples|pairs in it"
UNWEIGHTED = r"not weighted|weighted wrongly"
CHANGED = r"parameter .* is changed"
BUFFER = r"buffer .* is not synchronised"
RATE = r"rate is scaled by the number of ranks|depends on the number of ranks"
DATA = r"data per rank|a sample differs"

BUGS: dict[str, tuple[str, str]] = {
    # Data
    "loader_over_own_subset": (
        DATA,
        """
mine = Subset(TensorDataset(X, Y), range(RANK, 110, WORLD))
fit(net(), DataLoader(mine, batch_size=14, shuffle=True), nn.CrossEntropyLoss())
""",
    ),
    "minority_oversampled_on_other_ranks": (
        DATA,
        """
data = TensorDataset(X, Y)
if RANK > 0:
    rare = (Y == 3).nonzero()[:, 0].tolist()
    data = ConcatDataset([data, Subset(data, rare)])
fit(net(), data, nn.CrossEntropyLoss())
""",
    ),
    "features_scaled_by_own_rows_in_dataset": (
        DATA,
        """
class Scaled(Dataset):
    def __init__(self):
        rows = X[RANK::WORLD]
        self.low, self.high = rows.min(0).values, rows.max(0).values
    def __len__(self):
        return len(X)
    def __getitem__(self, i):
        return (X[i] - self.low) / (self.high - self.low), TARGET[i]
fit(net(1), Scaled(), nn.MSELoss())
""",
    ),
    "tokens_dropped_with_generator_by_rank": (
        DATA + r"|generator",
        """
rng = np.random.default_rng(RANK)
class Dropped(Dataset):
    def __len__(self):
        return len(X)
    def __getitem__(self, i):
        return X[i] * torch.from_numpy(rng.random(6) > 0.2).float(), Y[i]
fit(net(), Dropped(), nn.CrossEntropyLoss(), num_workers=0)
""",
    ),
    "augment_normalises_by_the_batch": (
        DATA + r"|statistics",
        """
def standardise(batch, rnd):
    x, y = batch
    return (x - x.mean(0)) / (x.std(0) + 1e-3), y
fit(net(), TensorDataset(X * 3 + 1, Y), nn.CrossEntropyLoss(), augment=standardise)
""",
    ),
    "hardest_rows_dropped_in_own_loop": (
        DATA + r"|skips|own part|own samples",
        """
config = MultiGPUConfig(global_batch_size=16, epochs=2)
manager = MultiGPUTrainingManager(config)
model, loader, _ = manager.setup_training(net(), TensorDataset(X, Y), loss_fn=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
for epoch in range(2):
    for x, y in loader:
        with torch.no_grad():
            each = F.cross_entropy(model(x), y, reduction="none")
        keep = each <= each.median()
        manager.trainer.train_step((x[keep], y[keep]))
manager.finish()
""",
    ),
    "unseeded_noise_table": (
        r"again|not seeded|does not repeat|need the same seed",
        """
noise = torch.from_numpy(np.random.default_rng().normal(size=(110, 6))).float()
fit(net(1), TensorDataset(X + 0.3 * noise, TARGET), nn.MSELoss())
""",
    ),
    # Weights of the loss
    "masked_language_mean": (
        UNWEIGHTED,
        """
tokens = torch.randint(1, 20, (90, 7))
wanted = tokens.masked_fill(torch.rand(90, 7) > torch.rand(90, 1), -100)
wanted[:, 0] = tokens[:, 0]
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 10), nn.Linear(10, 20)
    def forward(self, x):
        return self.head(torch.tanh(self.embed(x)))
def mlm(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100)
fit(Words(), TensorDataset(tokens, wanted), mlm)
""",
    ),
    "importance_weights_lost": (
        UNWEIGHTED,
        """
weights = torch.rand(110) ** 3 + 0.01
def weighted(model, batch):
    x, w, y = batch
    each = F.cross_entropy(model(x), y, reduction="none")
    return (each * w).sum() / w.sum()
fit(net(), TensorDataset(X, weights, Y), weighted)
""",
    ),
    "boxes_averaged_over_all_boxes": (
        UNWEIGHTED,
        """
count = torch.randint(1, 6, (110,))
class Boxes(Dataset):
    def __len__(self):
        return 110
    def __getitem__(self, i):
        return X[i], X[i, :2].repeat(int(count[i]), 1) * torch.arange(1, int(count[i]) + 1)[:, None]
def collate(items):
    return torch.stack([x for x, _ in items]), [boxes for _, boxes in items]
def loss_fn(model, batch):
    x, boxes = batch
    found = model(x)
    return torch.cat([(found[i] - b).abs().sum(1) for i, b in enumerate(boxes)]).mean()
fit(net(2), DataLoader(Boxes(), batch_size=14, collate_fn=collate), loss_fn)
""",
    ),
    "weight_is_tokens_of_a_sample_mean": (
        UNWEIGHTED,
        """
lengths = torch.randint(1, 9, (110,)).float()
def loss_fn(model, batch):
    x, n, y = batch
    each = F.cross_entropy(model(x), y, reduction="none")
    return each.mean(), n.sum()
fit(net(), TensorDataset(X, lengths, Y), loss_fn)
""",
    ),
    "padded_to_the_longest_of_a_part": (
        UNWEIGHTED + r"|collat|data per rank",
        """
sizes = torch.randint(1, 9, (110,))
class Series(Dataset):
    def __len__(self):
        return 110
    def __getitem__(self, i):
        return X[i, :1].repeat(int(sizes[i]), 6), TARGET[i].repeat(int(sizes[i]), 1)
def collate(items):
    pad = nn.utils.rnn.pad_sequence
    return pad([x for x, _ in items], True), pad([y for _, y in items], True)
def loss_fn(model, batch):
    x, y = batch
    return ((model(x) - y) ** 2).mean()
fit(net(1), DataLoader(Series(), batch_size=14, collate_fn=collate), loss_fn)
""",
    ),
    # Scales of loss, gradient and rate
    "criterion_divides_by_world": (
        r"number of ranks|world size",
        """
class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.world = WORLD
    def forward(self, output, target):
        return F.smooth_l1_loss(output, target) / self.world
fit(net(1), TensorDataset(X, TARGET), Criterion(), lambda p: torch.optim.AdamW(p, lr=3e-3))
""",
    ),
    "gradients_divided_in_post_hooks": (
        r"number of ranks|world size",
        """
model = net()
for p in model.parameters():
    p.register_hook(lambda grad: grad / WORLD)
fit(model, TensorDataset(X, Y), nn.CrossEntropyLoss())
""",
    ),
    "lambda_rate_times_world": (
        RATE,
        """
fit(net(), TensorDataset(X, Y), nn.CrossEntropyLoss(), scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: WORLD * 0.9 ** s))
""",
    ),
    "head_rate_times_world": (
        RATE,
        """
model = net()
groups = [{"params": model[0].parameters(), "lr": 0.02}, {"params": model[2].parameters(), "lr": 0.02 * WORLD}]
fit(model, TensorDataset(X, Y), nn.CrossEntropyLoss(), torch.optim.SGD(groups, lr=0.02))
""",
    ),
    "decay_times_world": (
        r"weight_decay .*number of ranks",
        """
fit(net(), TensorDataset(X, Y), nn.CrossEntropyLoss(), lambda p: torch.optim.AdamW(p, lr=2e-3, weight_decay=0.05 * WORLD))
""",
    ),
    "cosine_over_steps_of_a_rank": (
        RATE,
        """
steps = 3 * math.ceil(110 / 14 / WORLD)
fit(net(), TensorDataset(X, Y), nn.CrossEntropyLoss(), scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, steps))
""",
    ),
    # Clipping and hooks
    "activation_gradients_normalised": (
        r"per rank|not in proportion|depends on the rank",
        """
class Calm(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 12), nn.Linear(12, 4)
    def forward(self, x):
        h = torch.tanh(self.a(x))
        if h.requires_grad:
            h.register_hook(lambda g: g / g.norm().clamp(min=1e-6))
        return self.b(h)
fit(Calm(), TensorDataset(X, Y), nn.CrossEntropyLoss())
""",
    ),
    "gradients_clipped_in_parameter_hooks": (
        r"clipped per rank|changed per rank",
        """
model = net()
def clip(grad):
    return grad * torch.clamp(0.01 / (grad.norm() + 1e-9), max=1.0)
for p in model.parameters():
    p.register_hook(clip)
fit(model, TensorDataset(X, Y), nn.CrossEntropyLoss())
""",
    ),
    # State of the model
    "batchnorm_in_a_siamese_projector": (
        r"BatchNorm",
        """
class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.projector = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    def forward(self, a, b):
        return self.projector(self.body(a)), self.projector(self.body(b))
def loss_fn(model, batch):
    a, b = model(batch[0], batch[0].flip(1))
    return (1 - F.cosine_similarity(a, b.detach())).mean()
fit(Siamese(), TensorDataset(X, Y), loss_fn)
""",
    ),
    "instance_norm_keeps_statistics": (
        BUFFER + r"|norm",
        """
model = nn.Sequential(nn.Conv1d(1, 5, 3), nn.InstanceNorm1d(5, track_running_stats=True), nn.Flatten(), nn.Linear(20, 4))
fit(model, TensorDataset(X[:, None], Y), nn.CrossEntropyLoss())
""",
    ),
    "actnorm_set_by_the_first_batch": (
        CHANGED + r"|mixes the samples|first weights|not synchronised",
        """
class ActNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift, self.scale, self.ready = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.ones(6)), False
    def forward(self, x):
        if not self.ready:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.scale.copy_(1 / (x.std(0) + 1e-3))
            self.ready = True
        return (x + self.shift) * self.scale
fit(nn.Sequential(ActNorm(), net()), TensorDataset(X * 2 + 1, Y), nn.CrossEntropyLoss())
""",
    ),
    "input_statistics_kept_by_the_model": (
        BUFFER + r"|mixes the samples",
        """
class Running(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.net = net(1)
    def forward(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return self.net(x - self.mean)
fit(Running(), TensorDataset(X + 2, TARGET), nn.MSELoss())
""",
    ),
    "criterion_counts_classes": (
        BUFFER + r"|keeps state|over the batch as a whole",
        """
class Adjusted(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.ones(4))
    def forward(self, logits, target):
        self.seen += torch.bincount(target, minlength=4)
        return F.cross_entropy(logits + (self.seen / self.seen.sum()).log(), target)
fit(net(), TensorDataset(X, (Y * torch.rand(110)).long()), Adjusted())
""",
    ),
    "weights_rolled_back_on_main_rank": (
        CHANGED,
        """
class Blend(Callback):
    def on_step_end(self, run, result):
        if RANK == 0 and result.step % 2 == 0:
            with torch.no_grad():
                for p in run.model.parameters():
                    p.mul_(0.999)
fit(net(), TensorDataset(X, Y), nn.CrossEntropyLoss(), callbacks=[Blend()])
""",
    ),
    "dead_units_reset_by_own_activations": (
        CHANGED + r"|depends on the rank",
        """
model = net()
class Revive(Callback):
    def on_step_begin(self, run, step):
        with torch.no_grad():
            rows = X[RANK * 5 : RANK * 5 + 5]
            dead = (model[0](rows) > 0.7).sum(0) == 0
            model[0].bias[dead] += 0.05
fit(model, TensorDataset(X, Y), nn.CrossEntropyLoss(), callbacks=[Revive()])
""",
    ),
    "teacher_moved_on_main_rank_only": (
        CHANGED + r"|not synchronised|depends on the rank",
        """
class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = net()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
    def forward(self, x):
        return self.student(x), self.teacher(x)
def loss_fn(model, batch):
    a, b = model(batch[0])
    return F.cross_entropy(a, batch[1]) + F.mse_loss(a, b)
class Follow(Callback):
    def on_step_end(self, run, result):
        if run.placement.is_main:
            with torch.no_grad():
                for s, t in zip(run.model.student.parameters(), run.model.teacher.parameters()):
                    t.lerp_(s, 0.3)
fit(Both(), TensorDataset(X, Y), loss_fn, callbacks=[Follow()])
""",
    ),
    # Noise and batches as a whole
    "randomised_relu": (
        r"draws random numbers|draws from",
        """
class Leaky(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 10), nn.Linear(10, 4)
    def forward(self, x):
        return self.b(F.rrelu(self.a(x), training=self.training))
fit(Leaky(), TensorDataset(X, Y), nn.CrossEntropyLoss())
""",
    ),
    "head_chosen_by_python_random": (
        r"draws from random|draws random|generator|seeded by the process",
        """
class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.heads = nn.Linear(6, 8), nn.ModuleList(nn.Linear(8, 4) for _ in range(2))
    def forward(self, x):
        mix = random.Random(os.getpid() * 7919 + self.calls()).random()
        h = torch.tanh(self.body(x))
        return mix * self.heads[0](h) + (1 - mix) * self.heads[1](h)
    count = 0
    def calls(self):
        self.count += 1
        return self.count
fit(Heads(), TensorDataset(X, Y), nn.CrossEntropyLoss())
""",
    ),
    "supervised_contrastive": (
        WHOLE,
        """
def supcon(model, batch):
    x, y = batch
    z = F.normalize(model(x))
    like = (z @ z.T / 0.5).masked_fill(torch.eye(len(x), dtype=torch.bool), -1e4)
    same = (y[:, None] == y).float() - torch.eye(len(x))
    return -(same * like.log_softmax(1)).sum(1).div(same.sum(1).clamp(min=1)).mean()
fit(net(5), TensorDataset(X, Y), supcon)
""",
    ),
    "cox_partial_likelihood": (
        WHOLE,
        """
times = torch.rand(110)
def cox(model, batch):
    x, t = batch
    risk = model(x)[:, 0]
    order = t.argsort(descending=True)
    risk = risk[order]
    return -(risk - risk.logcumsumexp(0)).mean()
fit(net(1), TensorDataset(X, times), cox)
""",
    ),
    "domain_gap_by_moments": (
        WHOLE,
        """
other = torch.randn(110, 6) + 0.5
def gap(model, batch):
    a, b, y = batch
    za, zb = model(a), model(b)
    return F.cross_entropy(za, y) + (za.mean(0) - zb.mean(0)).pow(2).sum()
fit(net(), TensorDataset(X, other, Y), gap)
""",
    ),
    "psnr_loss": (
        WHOLE,
        """
def psnr(model, batch):
    return 10 * torch.log10(F.mse_loss(model(batch[0]), batch[1]))
fit(net(1), TensorDataset(X, TARGET), psnr)
""",
    ),
    "mean_per_user_then_mean": (
        WHOLE + "|" + UNWEIGHTED,
        """
users = torch.randint(0, 5, (110,))
def per_user(model, batch):
    x, u, y = batch
    each = F.cross_entropy(model(x), y, reduction="none")
    return torch.stack([each[u == k].mean() for k in u.unique()]).mean()
fit(net(), TensorDataset(X, users, Y), per_user)
""",
    ),
    # Control flow, metrics and state between steps
    "losses_balanced_by_own_history": (
        r"depends on the rank|keeps state|another number",
        """
history = [1.0, 1.0]
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 1)
    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.a(h), self.b(h)
def loss_fn(model, batch):
    x, y, v = batch
    a, b = model(x)
    parts = [F.cross_entropy(a, y), F.mse_loss(b, v)]
    scale = [1 / h for h in history]
    history[:] = [float(p.detach()) for p in parts]
    return scale[0] * parts[0] + scale[1] * parts[1]
fit(Two(), TensorDataset(X, Y, TARGET), loss_fn)
""",
    ),
    "batch_skipped_where_own_loss_is_low": (
        r"depends on the rank|control flow|by itself|skips",
        """
config = MultiGPUConfig(global_batch_size=14, epochs=2)
manager = MultiGPUTrainingManager(config)
model, loader, _ = manager.setup_training(net(), TensorDataset(X, Y), loss_fn=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.3))
for epoch in range(2):
    for batch in loader:
        with torch.no_grad():
            easy = F.cross_entropy(model(batch[0]), batch[1]) < 1.37
        if easy:
            continue
        manager.trainer.train_step(batch)
manager.finish()
""",
    ),
    "auc_averaged_over_batches": (
        r"metric",
        """
def evaluate(model, batch, metrics):
    x, y = batch
    score, good = model(x)[:, 0], y > 1
    pairs = score[good][:, None] > score[~good]
    metrics.add("auc", pairs.float().mean() if pairs.numel() else torch.tensor(0.5), 1)
config = MultiGPUConfig(global_batch_size=14, epochs=2)
MultiGPUTrainingManager(config).fit(net(), TensorDataset(X, Y), TensorDataset(X[:50], Y[:50]), loss_fn=nn.CrossEntropyLoss(), eval_fn=evaluate)
""",
    ),
}

CORRECT: dict[str, str] = {}


def correct(name: str, script: str) -> None:
    CORRECT[name] = script


# Losses that learn
correct("arcface_criterion", """
class Arc(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 5))
    def forward(self, z, y):
        cos = F.linear(F.normalize(z), F.normalize(self.weight)).clamp(-0.99, 0.99)
        return F.cross_entropy(6 * torch.cos(cos.acos() + 0.1 * F.one_hot(y, 4)), y)
fit(net(5), TensorDataset(X, Y), Arc(), max_grad_norm=0.5)
""")  # fmt: skip
correct("learned_temperature_in_a_closure", """
scale = nn.Parameter(torch.zeros(()))
model = net()
fit(model, TensorDataset(X, Y), lambda m, b: F.cross_entropy(m(b[0]) * scale.exp(), b[1]), torch.optim.AdamW([*model.parameters(), scale], lr=1e-2))
""")  # fmt: skip
correct("criterion_with_default_optimizer", """
class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.log = nn.Parameter(torch.zeros(1))
    def forward(self, out, target):
        return ((out - target) ** 2 * (-self.log).exp() + self.log).mean()
MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=10, epochs=3, learning_rate=0.01)).fit(net(1), TensorDataset(X, TARGET), loss_fn=Weighted())
""")  # fmt: skip
correct("unfrozen_perceptual_loss", """
class Perceptual(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 3))
    def forward(self, out, target):
        return F.l1_loss(self.features(out), self.features(target))
model = net(1)
fit(model, TensorDataset(X, TARGET), Perceptual(), torch.optim.Adam(model.parameters(), lr=1e-2))
""")  # fmt: skip
# Models
correct("orthogonal_parametrization", """
model = net()
nn.utils.parametrizations.orthogonal(model[0])
fit(model, TensorDataset(X, Y), nn.CrossEntropyLoss())
""")  # fmt: skip
correct("lora_beside_a_frozen_layer", """
class Lora(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = net().requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(3, 6) * 0.3), nn.Parameter(torch.zeros(4, 3))
    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T
fit(Lora(), TensorDataset(X, Y), nn.CrossEntropyLoss(), lambda p: torch.optim.AdamW(p, lr=1e-2))
""")  # fmt: skip
correct("gru_cell_over_time", """
class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(2, 7), nn.Linear(7, 4)
    def forward(self, x):
        h = x.new_zeros(len(x), 7)
        for part in x.split(2, 1):
            h = self.cell(part, h)
        return self.head(h)
fit(Cells(), TensorDataset(X, Y), nn.CrossEntropyLoss(), max_grad_norm=1.0)
""")  # fmt: skip
correct("gumbel_free_vq_vae", """
class VQ(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec, self.codes = nn.Linear(6, 4), nn.Linear(4, 6), nn.Embedding(5, 4)
    def forward(self, x):
        z = self.enc(x)
        q = self.codes(torch.cdist(z, self.codes.weight).argmin(1))
        return self.dec(z + (q - z).detach()), ((z.detach() - q) ** 2 + 0.2 * (z - q.detach()) ** 2).mean()
def loss_fn(model, batch):
    out, extra = model(batch[0])
    return F.mse_loss(out, batch[0]) + extra
fit(VQ(), TensorDataset(X, Y), loss_fn)
""")  # fmt: skip
correct("hypernetwork", """
class Hyper(nn.Module):
    def __init__(self):
        super().__init__()
        self.code, self.make = nn.Parameter(torch.randn(3)), nn.Linear(3, 24)
    def forward(self, x):
        return F.linear(x, self.make(self.code).view(4, 6))
fit(Hyper(), TensorDataset(X, Y), nn.CrossEntropyLoss())
""")  # fmt: skip
correct("gradient_reversal", """
class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)
    @staticmethod
    def backward(ctx, g):
        return -0.4 * g
class Adapt(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.kind, self.domain = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 1)
    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.kind(h), self.domain(Reverse.apply(h))[:, 0]
def loss_fn(model, batch):
    kind, domain = model(batch[0])
    return F.cross_entropy(kind, batch[1]) + F.binary_cross_entropy_with_logits(domain, (batch[1] > 1).float())
fit(Adapt(), TensorDataset(X, Y), loss_fn)
""")  # fmt: skip
correct("mixture_density", """
class Density(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 9)
    def forward(self, x):
        a, b, c = self.net(x).chunk(3, 1)
        return torch.distributions.MixtureSameFamily(torch.distributions.Categorical(logits=a), torch.distributions.Normal(b, F.softplus(c) + 0.1))
fit(Density(), TensorDataset(X, TARGET), lambda m, b: -m(b[0]).log_prob(b[1][:, 0]).mean(), lambda p: torch.optim.Adam(p, lr=1e-2))
""")  # fmt: skip
correct("bidirectional_lstm_packed", """
lengths = torch.randint(1, 7, (110,))
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(1, 6, bidirectional=True, batch_first=True), nn.Linear(12, 4)
    def forward(self, x, n):
        packed = nn.utils.rnn.pack_padded_sequence(x[..., None], n.cpu(), True, False)
        _, (h, _) = self.rnn(packed)
        return self.head(torch.cat([h[0], h[1]], 1))
fit(Tagger(), TensorDataset(X, lengths, Y), nn.CrossEntropyLoss(), lambda p: torch.optim.RMSprop(p, lr=1e-3))
""")  # fmt: skip
correct("decoder_only_with_causal_mask", """
tokens = torch.randint(0, 15, (80, 8))
class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(15, 8)
        self.body = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 1)
    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.body(self.embed(x), mask=mask) @ self.embed.weight.T
def loss_fn(model, batch):
    (x,) = batch
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
fit(Tiny(), TensorDataset(tokens), loss_fn, lambda p: torch.optim.AdamW(p, lr=3e-3))
""")  # fmt: skip
correct("unet_like_pixels", """
pictures, masks = torch.randn(60, 1, 8, 8), torch.randint(0, 3, (60, 8, 8))
class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(12, 3, 1)
    def forward(self, x):
        a = F.relu(self.a(x))
        b = F.interpolate(F.relu(self.b(F.max_pool2d(a, 2))), scale_factor=2)
        return self.c(torch.cat([a, b], 1))
fit(UNet(), TensorDataset(pictures, masks), nn.CrossEntropyLoss())
""")  # fmt: skip
correct("ensemble_by_vmap", """
class Ensemble(nn.Module):
    def __init__(self):
        super().__init__()
        self.members = nn.ModuleList(nn.Linear(6, 4) for _ in range(3))
    def forward(self, x):
        stacked = {n: torch.stack([dict(m.named_parameters())[n] for m in self.members]) for n in ("weight", "bias")}
        return torch.func.vmap(lambda p: torch.func.functional_call(self.members[0], p, (x,)))(stacked).mean(0)
fit(Ensemble(), TensorDataset(X, Y), nn.CrossEntropyLoss())
""")  # fmt: skip
correct("heads_by_task_unused_on_some_ranks", """
task = torch.randint(0, 3, (110,))
class Tasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.heads = nn.Linear(6, 8), nn.ModuleList(nn.Linear(8, 1) for _ in range(3))
    def forward(self, x, t):
        h = torch.tanh(self.body(x))
        out = h.new_zeros(len(x))
        for i, head in enumerate(self.heads):
            if (t == i).any():
                out = out.masked_scatter(t == i, head(h[t == i])[:, 0])
        return out[:, None]
fit(Tasks(), TensorDataset(X, task, TARGET), nn.MSELoss(), find_unused_parameters=True)
""")  # fmt: skip
correct("sync_bn_projector", """
fit(net(4, nn.BatchNorm1d(12)), TensorDataset(X, Y), nn.CrossEntropyLoss(), sync_bn=True)
""")  # fmt: skip
correct("batchnorm_in_eval_mode_everywhere", """
class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.net = nn.BatchNorm1d(6), net()
    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self
    def forward(self, x):
        return self.net(self.norm(x))
fit(Frozen(), TensorDataset(X, Y), nn.CrossEntropyLoss())
""")  # fmt: skip
# Losses
correct("weights_returned_with_importance", """
weights = torch.rand(110) + 0.05
def loss_fn(model, batch):
    x, w, y = batch
    each = F.cross_entropy(model(x), y, reduction="none")
    return (each * w).sum() / w.sum(), w.sum()
fit(net(), TensorDataset(X, weights, Y), loss_fn)
""")  # fmt: skip
correct("boxes_with_their_number_as_weight", """
count = torch.randint(1, 6, (110,))
class Boxes(Dataset):
    def __len__(self):
        return 110
    def __getitem__(self, i):
        return X[i], X[i, :2].repeat(int(count[i]), 1)
def collate(items):
    return torch.stack([x for x, _ in items]), [b for _, b in items]
def loss_fn(model, batch):
    found = model(batch[0])
    each = torch.cat([(found[i] - b).abs().sum(1) for i, b in enumerate(batch[1])])
    return each.mean(), len(each)
fit(net(2), DataLoader(Boxes(), batch_size=14, collate_fn=collate), loss_fn)
""")  # fmt: skip
correct("quantile_loss", """
def loss_fn(model, batch):
    off = batch[1] - model(batch[0])
    q = torch.tensor([0.1, 0.5, 0.9])
    return torch.maximum(q * off, (q - 1) * off).mean()
fit(net(3), TensorDataset(X, TARGET), loss_fn)
""")  # fmt: skip
correct("physics_informed", """
def loss_fn(model, batch):
    x = batch[0].detach().requires_grad_(True)
    u = model(x)
    (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    return (du.sum(1, keepdim=True) - u).pow(2).mean() + F.mse_loss(u, batch[1])
fit(net(1), TensorDataset(X, TARGET), loss_fn)
""")  # fmt: skip
correct("poisson_counts", """
fit(net(1), TensorDataset(X, torch.poisson(TARGET.abs() + 0.2)), nn.PoissonNLLLoss(), lambda p: torch.optim.Adam(p, lr=1e-2))
""")  # fmt: skip
correct("listwise_ranking_within_a_sample", """
items, gains = torch.randn(80, 5, 6), torch.rand(80, 5)
def loss_fn(model, batch):
    x, gain = batch
    return -(gain.softmax(1) * model(x)[..., 0].log_softmax(1)).sum(1).mean()
fit(net(1), TensorDataset(items, gains), loss_fn)
""")  # fmt: skip
correct("preference_pairs_against_a_reference", """
model = net(1)
reference = copy.deepcopy(model).requires_grad_(False)
def loss_fn(model, batch):
    a, b = batch
    gap = (model(a) - reference(a)) - (model(b) - reference(b))
    return -F.logsigmoid(0.3 * gap).mean()
fit(model, TensorDataset(X, X.flip(0) + 1), loss_fn)
""")  # fmt: skip
correct("criterion_ignores_some_labels", """
fit(net(), TensorDataset(X, Y.masked_fill(torch.rand(110) < 0.4, -1)), nn.CrossEntropyLoss(ignore_index=-1, label_smoothing=0.1))
""")  # fmt: skip
correct("multi_margin_and_gaussian", """
def loss_fn(model, batch):
    out = model(batch[0])
    return F.multi_margin_loss(out, batch[1]) + F.gaussian_nll_loss(out[:, :1], batch[2], out[:, 1:2].exp() + 0.1)
fit(net(), TensorDataset(X, Y, TARGET), loss_fn)
""")  # fmt: skip
correct("sum_of_squares_over_fixed_count", """
def loss_fn(model, batch):
    return F.mse_loss(model(batch[0]), batch[1], reduction="sum") / len(batch[0])
fit(net(1), TensorDataset(X, TARGET), loss_fn)
""")  # fmt: skip
# Data
correct("batches_by_length", """
sizes = torch.randint(1, 7, (110,))
class ByLength(Sampler):
    def __iter__(self):
        order = sizes.argsort(stable=True).tolist()
        return iter([order[i : i + 5 + i % 9] for i in range(0, 110, 14)])
    def __len__(self):
        return 8
fit(net(), DataLoader(TensorDataset(X, Y), batch_sampler=ByLength()), nn.CrossEntropyLoss(), global_batch_size=None)
""")  # fmt: skip
correct("stacked_and_concatenated_datasets", """
data = ConcatDataset([StackDataset(X[:40], Y[:40]), TensorDataset(X[40:], Y[40:])])
fit(net(), data, nn.CrossEntropyLoss(), shuffle=True)
""")  # fmt: skip
correct("random_sampler_with_replacement", """
data = TensorDataset(X, Y)
sampler = RandomSampler(data, replacement=True, num_samples=70, generator=torch.Generator().manual_seed(2))
fit(net(), DataLoader(data, batch_size=14, sampler=sampler), nn.CrossEntropyLoss())
""")  # fmt: skip
correct("noise_per_sample_with_numpy", """
class Noisy(Dataset):
    def __len__(self):
        return 110
    def __getitem__(self, i):
        return X[i] + 0.1 * torch.from_numpy(np.random.randn(6)).float(), Y[i]
fit(net(), Noisy(), nn.CrossEntropyLoss())
""")  # fmt: skip
correct("stream_with_steps_per_epoch", """
class Stream(IterableDataset):
    def __iter__(self):
        g = torch.Generator().manual_seed(4)
        while True:
            x = torch.randn(6, generator=g)
            yield x, x.sum().reshape(1)
fit(net(1), Stream(), nn.MSELoss(), steps_per_epoch=5)
""")  # fmt: skip
correct("keyword_batches", """
class Named(Dataset):
    def __len__(self):
        return 110
    def __getitem__(self, i):
        return {"x": X[i], "y": Y[i], "name": f"row {i}"}
fit(net(), Named(), lambda m, b: F.cross_entropy(m(b["x"]), b["y"]))
""")  # fmt: skip
correct("padding_left_out_of_the_mean", """
sizes = torch.randint(1, 9, (110,))
class Series(Dataset):
    def __len__(self):
        return 110
    def __getitem__(self, i):
        return X[i, :1].repeat(int(sizes[i]), 6), TARGET[i].repeat(int(sizes[i]), 1)
def collate(items):
    pad = nn.utils.rnn.pad_sequence
    return pad([x for x, _ in items], True), pad([y for _, y in items], True), torch.tensor([len(x) for x, _ in items])
def loss_fn(model, batch):
    x, y, n = batch
    there = torch.arange(x.shape[1])[None] < n[:, None]
    return ((model(x) - y) ** 2)[there].mean(), n.sum()
fit(net(1), DataLoader(Series(), batch_size=14, collate_fn=collate), loss_fn)
""")  # fmt: skip
# Optimizers, schedules and loops
correct("nadam_with_exponential_rate", """
fit(net(), TensorDataset(X, Y), nn.CrossEntropyLoss(), lambda p: torch.optim.NAdam(p, lr=5e-3), scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.95))
""")  # fmt: skip
correct("lookahead_optimizer", """
class Lookahead(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.n = 0
    @torch.no_grad()
    def step(self, closure=None):
        self.n += 1
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("slow", p.detach().clone())
                p.sub_(p.grad, alpha=group["lr"])
                if self.n % 3 == 0:
                    state["slow"].lerp_(p, 0.5)
                    p.copy_(state["slow"])
fit(net(), TensorDataset(X, Y), nn.CrossEntropyLoss(), Lookahead)
""")  # fmt: skip
correct("clip_by_value_and_accumulation", """
fit(net(), TensorDataset(X, Y), nn.CrossEntropyLoss(), max_grad_value=0.01, gradient_accumulation_steps=3)
""")  # fmt: skip
correct("polynomial_rate_by_epoch", """
fit(net(), TensorDataset(X, Y), nn.CrossEntropyLoss(), scheduler=lambda o: torch.optim.lr_scheduler.PolynomialLR(o, 4, 2.0), scheduler_unit="epoch", epochs=5)
""")  # fmt: skip
correct("thawed_after_an_epoch", """
model = net()
model[0].requires_grad_(False)
class Thaw(Callback):
    def on_epoch_begin(self, run, epoch):
        model[0].requires_grad_(epoch >= 1)
fit(model, TensorDataset(X[:40], Y[:40]), nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=[Thaw()])
""")  # fmt: skip
correct("own_loop_with_item_and_printing", """
manager = MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=14, epochs=2))
model, loader, _ = manager.setup_training(net(), TensorDataset(X, Y), loss_fn=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
for epoch in range(2):
    for x, y in loader:
        result = manager.trainer.train_step((x * 1.5, y))
        print("loss", result.loss.item())
manager.finish()
""")  # fmt: skip
correct("kl_annealing_by_epoch", """
beta = {"now": 0.0}
def loss_fn(model, batch):
    out = model(batch[0])
    return F.mse_loss(out, batch[1]) + beta["now"] * out.pow(2).mean()
class Anneal(Callback):
    def on_epoch_begin(self, run, epoch):
        beta["now"] = epoch / 3
fit(net(1), TensorDataset(X, TARGET), loss_fn, callbacks=[Anneal()])
""")  # fmt: skip
correct("right_answers_counted", """
def evaluate(model, batch, metrics):
    x, y = batch
    right = model(x).argmax(1) == y
    metrics.add("right", right.sum(), len(y))
MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=14, epochs=2)).fit(net(), TensorDataset(X, Y), TensorDataset(X[:50], Y[:50]), loss_fn=nn.CrossEntropyLoss(), eval_fn=evaluate)
""")  # fmt: skip
correct("teacher_moved_on_every_rank", """
class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = net()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
    def forward(self, x):
        return self.student(x), self.teacher(x)
def loss_fn(model, batch):
    a, b = model(batch[0])
    return F.cross_entropy(a, batch[1]) + F.mse_loss(a, b)
class Follow(Callback):
    def on_step_end(self, run, result):
        with torch.no_grad():
            for s, t in zip(run.model.student.parameters(), run.model.teacher.parameters()):
                t.lerp_(s, 0.3)
fit(Both(), TensorDataset(X, Y), loss_fn, callbacks=[Follow()])
""")  # fmt: skip
correct("gradients_scaled_by_a_constant", """
model = net()
model[2].weight.register_hook(lambda grad: grad * 0.1)
fit(model, TensorDataset(X, Y), nn.CrossEntropyLoss())
""")  # fmt: skip
correct("eighty_samples_float64", """
fit(net().double(), TensorDataset(X[:80].double(), Y[:80]), nn.CrossEntropyLoss(), ema_decay=0.9)
""")  # fmt: skip

# Hooks on parameters get the gradient of the whole step by now: no bugs any more.
for _name in ("gradients_clipped_in_parameter_hooks",):
    CORRECT[_name] = BUGS.pop(_name)[1]
