# ruff: noqa: E501
"""Scripts for `seeded_bugs.py` with habits from other loops: what people carry over and what they compute themselves.

Written before their first run. As in the other files: BUGS maps a name to what the cause must say and to the script,
CORRECT a name to the script.
"""

from __future__ import annotations

HEADER = """
import collections, copy, functools, itertools, math, os, random, tempfile, zlib
from pathlib import Path
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import *
from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

def rows(n=93, width=5, classes=3, seed=4):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(n, width, generator=random)
    return x, (x[:, :classes] * 2 + torch.randn(n, classes, generator=random)).argmax(1)

def mlp(width=5, out=3, hidden=10, *extra):
    torch.manual_seed(8)
    return nn.Sequential(nn.Linear(width, hidden), *extra, nn.SiLU(), nn.Linear(hidden, out))

def adam(p):
    return torch.optim.Adam(p, lr=5e-3)

def manage(**settings):
    return MultiGPUTrainingManager(MultiGPUConfig(**{"global_batch_size": 16, "epochs": 2, **settings}))
"""

DATA = r"data per rank|a sample (differs|looks)|generator|(not those|other|not the) (that one rank sees|samples)"
STATE = r"buffer .*(not synchronised|follows)|keeps state|state of each process|over the batch as a whole"
WHOLE = r"over the batch as a whole|in-batch pairs|mixes the samples"
RATE = r"learning rate|the rate"

BUGS: dict[str, tuple[str, str]] = {
    "words_hashed_by_python": (
        DATA,
        """
rng = random.Random(3)
words = ["ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen"]
texts = [[rng.choice(words) for _ in range(5)] for _ in range(93)]
labels = torch.tensor([int("cat" in t) + int("fox" in t) for t in texts])

class Texts(Dataset):
    def __len__(self):
        return len(texts)
    def __getitem__(self, i):
        bag = torch.zeros(16)
        for word in texts[i]:
            bag[hash(word) % 16] += 1
        return bag, labels[i]

manage().fit(mlp(16), Texts(), optimizer=adam)
""",
    ),
    "rate_from_own_first_batch": (
        RATE,
        """
manager = manage()
model = mlp()
model, loader, _ = manager.setup_training(model, TensorDataset(*rows()), optimizer=torch.optim.SGD(model.parameters(), 0.1))
for epoch in range(2):
    for step, batch in enumerate(loader):
        if step == 0 and epoch == 0:
            with torch.no_grad():
                start = float(F.cross_entropy(model(batch[0]), batch[1]))
            for group in manager.optimizer.param_groups:
                group["lr"] = 0.1 / start
        manager.trainer.train_step(batch)
manager.finish()
""",
    ),
    "focal_weights_normalised_over_the_batch": (
        WHOLE + "|not weighted",
        """
def focal(model, batch):
    x, y = batch
    each = F.cross_entropy(model(x), y, reduction="none")
    weight = (1 - (-each).exp()) ** 2
    return (weight * each).sum() / weight.sum()

manage().fit(mlp(), TensorDataset(*rows()), loss_fn=focal, optimizer=adam)
""",
    ),
    "experts_balanced_over_the_batch": (
        WHOLE,
        """
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.router, self.experts = nn.Linear(5, 4), nn.ModuleList(nn.Linear(5, 3) for _ in range(4))
    def forward(self, x):
        gates = self.router(x).softmax(1)
        return sum(g[:, None] * e(x) for g, e in zip(gates.T, self.experts)), gates

def loss_fn(model, batch):
    out, gates = model(batch[0])
    balance = 4 * (gates.mean(0) * F.one_hot(gates.argmax(1), 4).to(gates).mean(0)).sum()
    return F.cross_entropy(out, batch[1]) + 0.1 * balance

manage().fit(Experts(), TensorDataset(*rows()), loss_fn=loss_fn, optimizer=adam)
""",
    ),
    "penalty_on_the_norm_of_the_whole_input_gradient": (
        WHOLE + r"|gradients are changed per rank|not a mean|is a sum",
        """
def loss_fn(model, batch):
    x = batch[0].clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.cross_entropy(out, batch[1]) + 0.1 * (slope.norm() - 1) ** 2

manage().fit(mlp(), TensorDataset(*rows()), loss_fn=loss_fn, optimizer=adam)
""",
    ),
    "inputs_masked_by_python_random": (
        r"draws (from|random)|generator|own numbers",
        """
class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()
    def forward(self, x):
        if self.training:
            keep = torch.tensor([[random.random() < 0.8 for _ in range(5)] for _ in range(len(x))])
            x = x * keep.to(x)
        return self.net(x)

random.seed(0)
manage().fit(Masked(), TensorDataset(*rows()), optimizer=adam)
""",
    ),
    "ranking_quality_averaged_by_size": (
        r"metric",
        """
def auc(scores, wanted):
    good, bad = scores[wanted], scores[~wanted]
    return (good[:, None] > bad[None]).double().mean() if len(good) and len(bad) else torch.tensor(0.5)

def eval_fn(model, batch, metrics):
    x, y = batch
    logits = model(x)
    metrics.add("loss", F.cross_entropy(logits, y, reduction="sum"), len(y))
    metrics.add("auc", auc(logits[:, 0], y == 0) * len(y), len(y))

manage().fit(mlp(), TensorDataset(*rows()), TensorDataset(*rows(50, seed=6)), eval_fn=eval_fn, optimizer=adam)
""",
    ),
    "classes_weighted_by_what_was_seen": (
        STATE,
        """
seen = torch.ones(3)

def loss_fn(model, batch):
    x, y = batch
    seen.add_(torch.bincount(y, minlength=3))
    weight = (seen.sum() / seen).to(x)
    return (F.cross_entropy(model(x), y, reduction="none") * weight[y]).mean()

manage().fit(mlp(), TensorDataset(*rows()), loss_fn=loss_fn, optimizer=adam)
""",
    ),
    "constant_weight_of_a_mean_over_words": (
        r"not weighted|weighted wrongly|another weight",
        """
torch.manual_seed(2)
ids = torch.randint(1, 12, (80, 9))
for row, n in enumerate(torch.randint(2, 10, (80,)).tolist()):
    ids[row, n:] = 0

class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.rnn, self.out = nn.Embedding(12, 8), nn.RNN(8, 8, batch_first=True), nn.Linear(8, 12)
    def forward(self, ids):
        return self.out(self.rnn(self.words(ids))[0])

def loss_fn(model, batch):
    (ids,) = batch
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0), 1.0

manage().fit(Reader(), TensorDataset(ids), loss_fn=loss_fn, optimizer=adam)
""",
    ),
    "another_optimizer_on_other_ranks": (
        r"optimizer is set by each rank",
        """
model = mlp()
optimizer = torch.optim.Adam(model.parameters(), 1e-2) if rank == 0 else torch.optim.SGD(model.parameters(), 1e-2)
manage().fit(model, TensorDataset(*rows()), optimizer=optimizer)
""",
    ),
    "length_rounded_to_the_ranks": (
        r"dataset has|data per rank|number of steps",
        """
class Even(Dataset):
    def __init__(self):
        self.x, self.y = rows(91)
    def __len__(self):
        return len(self.x) // (4 * world) * (4 * world)  # the same for every worker
    def __getitem__(self, i):
        return self.x[i], self.y[i]

manage().fit(mlp(), Even(), optimizer=adam)
""",
    ),
    "epoch_of_a_stream_shared_out": (
        r"steps_per_epoch",
        """
class Forever(IterableDataset):
    def __iter__(self):
        random = torch.Generator().manual_seed(0)
        while True:
            x = torch.randn(5, generator=random)
            yield x, x[:3].argmax()

manage(steps_per_epoch=12 // world, schedule="cosine").fit(mlp(), Forever(), optimizer=adam)
""",
    ),
    "seed_of_the_config_by_rank": (
        r"\bseed\b",
        """
manage(seed=rank).fit(mlp(), TensorDataset(*rows()), optimizer=adam)
""",
    ),
    "statistics_synchronised_from_three_ranks_on": (
        r"sync_bn|BatchNorm",
        """
manage(sync_bn=world > 2).fit(mlp(5, 3, 10, nn.BatchNorm1d(10)), TensorDataset(*rows()), optimizer=adam)
""",
    ),
    "bias_of_the_rank": (
        r"depends on the rank|gradient",
        """
class Sited(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.site = nn.Parameter(torch.linspace(-1, 1, 12).view(4, 3))
    def forward(self, x):
        return self.net(x) + self.site[rank]

manage().fit(Sited(), TensorDataset(*rows()), optimizer=adam)
""",
    ),
    "negatives_gathered_without_gradient": (
        r"no gradient|in-batch pairs|exchanges|one side",
        """
def gathered(z):
    if world == 1:
        return z
    parts = [torch.zeros_like(z) for _ in range(world)]
    dist.all_gather(parts, z)
    return torch.cat(parts)

def loss_fn(model, batch):
    x, _ = batch
    a, b = F.normalize(model(x), dim=1), F.normalize(model(x * 0.8 + 0.1), dim=1)
    others = gathered(b.detach().contiguous())
    start = rank * len(x) if world > 1 else 0
    logits = a @ torch.cat([others[:start], b, others[start + len(x):]]).T / 0.3
    return F.cross_entropy(logits, torch.arange(start, start + len(x), device=x.device))

manage(global_batch_size=12).fit(mlp(out=6), TensorDataset(*rows(96)), loss_fn=loss_fn, optimizer=adam)
""",
    ),
    "plateau_of_own_training_loss": (
        RATE,
        """
manager = manage(epochs=3)
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), 0.2)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
model, loader, _ = manager.setup_training(model, TensorDataset(*rows()), optimizer=optimizer)
for epoch in range(3):
    for batch in loader:
        result = manager.trainer.train_step(batch)
        plateau.step(float(result.loss))
manager.finish()
""",
    ),
    "best_weights_by_own_loss": (
        r"parameter .*changed",
        """
manager = manage(epochs=4)
model = mlp()
model, loader, _ = manager.setup_training(model, TensorDataset(*rows()), optimizer=torch.optim.SGD(model.parameters(), 0.3))
best, kept = math.inf, None
for epoch in range(4):
    for batch in loader:
        before = {n: p.detach().clone() for n, p in model.state_dict().items()}
        loss = float(manager.trainer.train_step(batch).loss)
        if loss < best:
            best, kept = loss, before
        elif loss > 1.02 * best:
            model.load_state_dict(kept)
manager.finish()
""",
    ),
    "gradient_times_own_batch": (
        r"gradients? .*share of the batch|gradient .*(part of|the rank)",
        """
sizes = [16]

class Sizes(Callback):
    def on_exchange(self, run):
        pass

def loss_fn(model, batch):
    sizes[0] = len(batch[0])
    return F.cross_entropy(model(batch[0]), batch[1])

model = mlp()
for p in model.parameters():
    p.register_hook(lambda g: g * (sizes[0] / 16))
manage().fit(model, TensorDataset(*rows()), loss_fn=loss_fn, optimizer=torch.optim.SGD(model.parameters(), 0.1))
""",
    ),
    "words_per_batch_shared_out": (
        r"global batch|data per rank|sampler|batches",
        """
x, y = rows()
lengths = torch.randint(2, 9, (93,), generator=torch.Generator().manual_seed(1)).tolist()

class Budget(Sampler):
    def __init__(self, most):
        self.most = most
    def batches(self):
        batch, used = [], 0
        for i in torch.randperm(93, generator=torch.Generator().manual_seed(5)).tolist():
            if used + lengths[i] > self.most:
                yield batch
                batch, used = [], 0
            batch.append(i)
            used += lengths[i]
        yield batch
    def __iter__(self):
        return self.batches()
    def __len__(self):
        return sum(1 for _ in self.batches())

loader = DataLoader(TensorDataset(x, y), batch_sampler=Budget(96 // world))
MultiGPUTrainingManager(MultiGPUConfig(epochs=2)).fit(mlp(), loader, optimizer=adam)
""",
    ),
    "labels_numbered_as_they_come": (
        DATA,
        """
names = [["owl", "rat", "pig"][i] for i in rows()[1].tolist()]

class Named(Dataset):
    def __init__(self):
        self.x, self.ids = rows()[0], {}
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        return self.x[i], self.ids.setdefault(names[i], len(self.ids))

manage(seed=3).fit(mlp(), Named(), optimizer=adam)
""",
    ),
    "strength_raised_by_own_samples": (
        r"depends on the rank|number of ranks|keeps state|state of each process",
        """
strength = [0.0]

class Count(Callback):
    def on_step_end(self, run, result):
        strength[0] = min(1.0, run.step * (16 // world) / 64)

def loss_fn(model, batch):
    logits = model(batch[0])
    return F.cross_entropy(logits, batch[1]) + strength[0] * logits.square().sum(1).mean()

manage().fit(mlp(), TensorDataset(*rows()), loss_fn=loss_fn, optimizer=adam, callbacks=[Count()])
""",
    ),
    "noise_added_in_the_loop": (
        DATA + r"|draws|hands to train_step",
        """
manager = manage()
model = mlp()
model, loader, _ = manager.setup_training(model, TensorDataset(*rows()), optimizer=adam)
torch.manual_seed(0)
for epoch in range(2):
    for x, y in loader:
        manager.trainer.train_step((x + 0.1 * torch.randn_like(x), y))
manager.finish()
""",
    ),
    # --- a second look, after the repairs of the first ---
    "gradients_halved_on_other_ranks": (
        r"gradient.*(rank|wrapper)|changed .*rank",
        """
class Halve(Callback):
    def on_optimizer(self, run):
        if not run.placement.is_main:
            for p in run.model.parameters():
                p.grad.mul_(0.5)

manage().fit(mlp(), TensorDataset(*rows()), optimizer=lambda p: torch.optim.SGD(p, 0.1), callbacks=[Halve()])
""",
    ),
    "odd_ranks_mirror_their_rows": (
        DATA,
        """
class Mirrored(Dataset):
    def __init__(self):
        self.x, self.y = rows()
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        return (self.x[i].flip(0) if rank % 2 else self.x[i]), self.y[i]

manage().fit(mlp(), Mirrored(), optimizer=adam)
""",
    ),
    "places_over_the_padded_length": (
        r"pad|longest|length",
        """
torch.manual_seed(1)
texts = [torch.randint(1, 15, (n,)) for n in torch.randint(2, 12, (78,)).tolist()]

def collate(batch):
    return nn.utils.rnn.pad_sequence([t for t, _ in batch], batch_first=True), torch.tensor([y for _, y in batch])

class Placed(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.place, self.out = nn.Embedding(15, 8, padding_idx=0), nn.Linear(1, 8), nn.Linear(8, 2)
    def forward(self, ids):
        place = torch.linspace(0, 1, ids.shape[1], dtype=self.place.weight.dtype)[:, None]
        mask = (ids > 0)[..., None]
        return self.out(((self.words(ids) + self.place(place).tanh()) * mask).sum(1) / mask.sum(1))

loader = DataLoader([(t, int(t[0] > 7)) for t in texts], batch_size=12, shuffle=True, collate_fn=collate)
manage(global_batch_size=12).fit(Placed(), loader, optimizer=adam)
""",
    ),
    "negatives_remembered_in_a_list": (
        STATE + "|depends on the rank",
        """
memory = collections.deque(maxlen=24)

def loss_fn(model, batch):
    x, _ = batch
    a, b = F.normalize(model(x), dim=1), F.normalize(model(0.9 * x), dim=1)
    logits = (a * b).sum(1, keepdim=True)
    if memory:
        logits = torch.cat([logits, a @ torch.stack(list(memory)).T], 1)
    memory.extend(b.detach())
    return F.cross_entropy(logits / 0.3, torch.zeros(len(x), dtype=torch.long))

manage().fit(mlp(out=6), TensorDataset(*rows()), loss_fn=loss_fn, optimizer=adam)
""",
    ),
    "mean_teacher_moved_on_the_main_rank": (
        r"depends on the rank|state of each process|beside the model",
        """
student = mlp()
teacher = copy.deepcopy(student).requires_grad_(False)

class Move(Callback):
    def on_step_end(self, run, result):
        if run.placement.is_main:
            for t, s in zip(teacher.parameters(), run.model.parameters()):
                t.data = t.data.to(s).lerp(s.detach(), 0.3)

def loss_fn(model, batch):
    x, y = batch
    logits = model(x)
    return F.cross_entropy(logits, y) + F.mse_loss(logits.softmax(1), teacher.to(x.dtype)(x).softmax(1))

manage().fit(student, TensorDataset(*rows()), loss_fn=loss_fn, optimizer=torch.optim.SGD(student.parameters(), 0.3), callbacks=[Move()])
""",
    ),
    "batches_collected_by_the_ranks": (
        r"cuts or collects",
        """
manager = manage(epochs=3, global_batch_size=8)
model, loader, _ = manager.setup_training(mlp(), TensorDataset(*rows()), optimizer=adam)
held = []
for epoch in range(3):
    for x, y in loader:
        held.append((x.clone(), y.clone()))
        if len(held) == world:
            manager.trainer.train_step((torch.cat([a for a, _ in held]), torch.cat([b for _, b in held])))
            held = []
manager.finish()
""",
    ),
    "outputs_scaled_to_the_range_of_the_batch": (
        WHOLE,
        """
class Ranged(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()
    def forward(self, x):
        out = self.net(x)
        return 4 * (out - out.min()) / (out.max() - out.min() + 1e-6)

manage().fit(Ranged(), TensorDataset(*rows()), optimizer=adam)
""",
    ),
    "rows_chosen_by_numpy_seeded_with_the_rank": (
        DATA,
        """
np.random.seed(rank)
chosen = np.random.choice(93, 70, replace=False).tolist()
manage().fit(mlp(), Subset(TensorDataset(*rows()), chosen), optimizer=adam)
""",
    ),
    "penalty_times_the_ranks": (
        r"number of ranks",
        """
model = mlp()

def loss_fn(model, batch):
    penalty = sum(p.square().sum() for p in model.parameters())
    return F.cross_entropy(model(batch[0]), batch[1]) + 1e-3 * world * penalty

manage().fit(model, TensorDataset(*rows()), loss_fn=loss_fn, optimizer=torch.optim.SGD(model.parameters(), 0.1))
""",
    ),
    "rate_lowered_on_the_main_rank_after_validation": (
        RATE,
        """
class Lower(Callback):
    def on_validation(self, run, metrics):
        if run.placement.is_main:
            for group in run.optimizer.param_groups:
                group["lr"] *= 0.5

manage(validate_every=2).fit(mlp(), TensorDataset(*rows()), TensorDataset(*rows(40, seed=7)), optimizer=lambda p: torch.optim.SGD(p, 0.2), callbacks=[Lower()])
""",
    ),
    "one_cycle_over_own_loader": (
        RATE + "|momentum",
        """
data = TensorDataset(*rows())
own = DataLoader(data, batch_size=16 // world)
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=2 * len(own))
manage().fit(model, data, optimizer=optimizer, scheduler=scheduler)
""",
    ),
    "targets_blurred_by_numpy": (
        r"draws from|generator|own numbers",
        """
blur = np.random.default_rng(0)

def loss_fn(model, batch):
    x, y = batch
    soft = F.one_hot(y, 3) + torch.from_numpy(blur.normal(0, 0.05, (len(y), 3)))
    return F.mse_loss(model(x), soft.to(x))

manage().fit(mlp(), TensorDataset(*rows()), loss_fn=loss_fn, optimizer=adam)
""",
    ),
    "tasks_taken_in_turn_from_the_rank_on": (
        r"depends on the rank",
        """
turn = [0]

class Turn(Callback):
    def on_step_end(self, run, result):
        turn[0] = result.step

def loss_fn(model, batch):
    x, y = batch
    out = model(x)
    return F.cross_entropy(out, y) if (turn[0] + rank) % 2 == 0 else F.cross_entropy(out, (y + 1) % 3) * 0.5

manage().fit(mlp(), TensorDataset(*rows()), loss_fn=loss_fn, optimizer=adam, callbacks=[Turn()])
""",
    ),
}

CORRECT: dict[str, str] = {
    "weights_divided_by_the_ranks": """
def loss_fn(model, batch):
    x, y = batch
    importance = 1.0 + (y == 1)
    each = F.cross_entropy(model(x), y, reduction="none")
    return (each * importance).sum() / importance.sum(), importance.sum() / world

manage().fit(mlp(), TensorDataset(*rows()), loss_fn=loss_fn, optimizer=adam)
""",
    "words_hashed_by_checksum": """
rng = random.Random(3)
words = ["ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen"]
texts = [[rng.choice(words) for _ in range(5)] for _ in range(93)]

class Texts(Dataset):
    cache = {}
    def __len__(self):
        return len(texts)
    def __getitem__(self, i):
        if i not in self.cache:
            bag = torch.zeros(16)
            for word in texts[i]:
                bag[zlib.crc32(word.encode()) % 16] += 1
            self.cache[i] = bag
        return self.cache[i], int("cat" in texts[i])

manage().fit(mlp(16), Texts(), optimizer=adam)
""",
    "rate_from_the_whole_dataset": """
x, y = rows()
model = mlp()
with torch.no_grad():
    start = float(F.cross_entropy(model(x), y))
manage().fit(model, TensorDataset(x, y), optimizer=torch.optim.SGD(model.parameters(), 0.1 / start))
""",
    "experts_routed_by_sample": """
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.router, self.experts = nn.Linear(5, 4), nn.ModuleList(nn.Linear(5, 3) for _ in range(4))
    def forward(self, x):
        gates = self.router(x).softmax(1)
        top, which = gates.max(1)
        out = torch.stack([e(x) for e in self.experts], 1)
        return top[:, None] * out[torch.arange(len(x)), which], gates

def loss_fn(model, batch):
    out, gates = model(batch[0])
    return F.cross_entropy(out, batch[1]) - 0.01 * (gates * gates.log()).sum(1).mean()

manage().fit(Experts(), TensorDataset(*rows()), loss_fn=loss_fn, optimizer=adam)
""",
    "penalty_on_each_input_gradient": """
def loss_fn(model, batch):
    x = batch[0].clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.cross_entropy(out, batch[1]) + 0.1 * ((slope.norm(dim=1) - 1) ** 2).mean()

manage().fit(mlp(), TensorDataset(*rows()), loss_fn=loss_fn, optimizer=adam)
""",
    "masks_drawn_by_augment": """
def augment(batch, random):
    x, y = batch
    return x * (random.uniform(5) < 0.8), y

manage().fit(mlp(), TensorDataset(*rows()), augment=augment, optimizer=adam)
""",
    "counts_added_in_validation": """
def eval_fn(model, batch, metrics):
    x, y = batch
    logits = model(x)
    guess = logits.argmax(1)
    metrics.add("loss", F.cross_entropy(logits, y, reduction="sum"), len(y))
    for k in range(3):
        metrics.add(f"precision_{k}", ((guess == k) & (y == k)).sum(), (guess == k).sum())
    metrics.add_predictions(guess, y, classes=3)

manage().fit(mlp(), TensorDataset(*rows()), TensorDataset(*rows(50, seed=6)), eval_fn=eval_fn, optimizer=adam)
""",
    "largest_loss_logged_over_ranks": """
class Largest(Callback):
    def on_step_end(self, run, result):
        most = result.loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
        run.log(largest=most)

manage().fit(mlp(), TensorDataset(*rows()), optimizer=adam, callbacks=[Largest()])
""",
    "weights_written_by_the_main_rank": """
class Save(Callback):
    def on_step_end(self, run, result):
        if run.placement.is_main and result.step % 4 == 0:
            torch.save({k: v.cpu() for k, v in run.model.state_dict().items()}, Path(tempfile.gettempdir()) / f"w{os.getpid()}.pt")

manage().fit(mlp(), TensorDataset(*rows()), optimizer=adam, callbacks=[Save()])
""",
    "statistics_synchronised_where_there_are_ranks": """
manage(sync_bn=world > 1).fit(mlp(5, 3, 10, nn.BatchNorm1d(10)), TensorDataset(*rows()), optimizer=adam)
""",
    "words_per_batch_constant": """
x, y = rows()
lengths = torch.randint(2, 9, (93,), generator=torch.Generator().manual_seed(1)).tolist()

class Budget(Sampler):
    def __init__(self, most):
        self.kept, batch, used = [], [], 0
        for i in torch.randperm(93, generator=torch.Generator().manual_seed(5)).tolist():
            if used + lengths[i] > most:
                self.kept.append(batch)
                batch, used = [], 0
            batch.append(i)
            used += lengths[i]
        self.kept.append(batch)
    def __iter__(self):
        return iter(self.kept)
    def __len__(self):
        return len(self.kept)

loader = DataLoader(TensorDataset(x, y), batch_sampler=Budget(96))
MultiGPUTrainingManager(MultiGPUConfig(epochs=2)).fit(mlp(), loader, optimizer=adam)
""",
    "settings_by_world_that_change_nothing": """
manager = manage(log_every=5 * world, checkpoint_frequency=100 // world, num_workers=0, timeout=600 * world, consistency_check_every=40 // world)
manager.fit(mlp(), TensorDataset(*rows()), optimizer=adam)
""",
    "model_put_on_its_device_by_hand": """
manager = manage(max_grad_norm=1.0, gradient_accumulation_steps=2)
model = mlp().to(manager.placement.device)
optimizer = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 1e-3}, {"params": model[2].parameters(), "lr": 1e-2}])
manager.fit(model, TensorDataset(*rows()), optimizer=optimizer)
""",
    "texts_tokenised_by_the_collator": """
rng = random.Random(1)
texts = ["".join(rng.choice("abcd") for _ in range(rng.randint(2, 9))) for _ in range(84)]

def collate(batch):
    words, labels = zip(*batch)
    width = max(map(len, words))
    ids = torch.tensor([[ord(c) - 96 for c in w.ljust(width, chr(96))] for w in words])
    return {"ids": ids, "mask": ids > 0, "labels": torch.tensor(labels)}

class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(5, 8), nn.Linear(8, 2)
    def forward(self, ids, mask):
        m = mask[..., None]
        return self.out((self.words(ids) * m).sum(1) / m.sum(1))

torch.manual_seed(0)
loader = DataLoader([(t, int("aa" in t)) for t in texts], batch_size=12, shuffle=True, collate_fn=collate)
MultiGPUTrainingManager(MultiGPUConfig(global_batch_size=12, epochs=2)).fit(
    Mean(), loader, loss_fn=lambda m, b: F.cross_entropy(m(b["ids"], b["mask"]), b["labels"]), optimizer=adam)
""",
    "lookahead_on_every_rank": """
class Lookahead(Callback):
    def on_setup(self, run):
        self.slow = None
    def on_step_end(self, run, result):
        if self.slow is None:
            self.slow = [p.detach().clone() for p in run.model.parameters()]
        if result.step % 3 == 0:
            with torch.no_grad():
                for slow, p in zip(self.slow, run.model.parameters()):
                    slow.lerp_(p, 0.5)
                    p.copy_(slow)

manage().fit(mlp(), TensorDataset(*rows()), optimizer=adam, callbacks=[Lookahead()])
""",
    "endless_stream_with_an_epoch": """
class Forever(IterableDataset):
    def __iter__(self):
        random = torch.Generator().manual_seed(0)
        while True:
            x = torch.randn(5, generator=random)
            yield x, x[:3].argmax()

manage(steps_per_epoch=6, schedule="linear", warmup_steps=2).fit(mlp(), Forever(), optimizer=adam)
""",
    "metrics_beside_a_weighted_loss": """
def loss_fn(model, batch):
    x, y = batch
    keep = y != 0
    logits = model(x)
    each = F.cross_entropy(logits, y, reduction="none") * keep
    right = ((logits.argmax(1) == y) & keep).sum()
    return each.sum() / keep.sum().clamp(min=1), keep.sum(), {"accuracy": (right, keep.sum()), "kept": (keep.sum(), len(y))}

manage().fit(mlp(), TensorDataset(*rows()), loss_fn=loss_fn, optimizer=adam)
""",
    "processes_seeded_by_rank_and_samples_by_number": """
random.seed(rank)
np.random.seed(100 + rank)

class Shaken(Dataset):
    def __init__(self):
        self.x, self.y = rows()
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        return self.x[i] + float(np.random.normal(0, 0.1)) + random.gauss(0, 0.1), self.y[i]

manage().fit(mlp(), Shaken(), optimizer=adam)
""",
    "noise_of_the_optimizer_by_step": """
class Shaken(torch.optim.SGD):
    count = 0
    def step(self, closure=None):
        found = super().step(closure)
        self.count += 1
        draw = torch.Generator().manual_seed(self.count)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(torch.randn(p.shape, generator=draw).to(p), alpha=1e-3)
        return found

model = mlp()
manage().fit(model, TensorDataset(*rows()), optimizer=Shaken(model.parameters(), lr=0.1))
""",
    "sequences_with_fresh_state_and_clamped_gradients": """
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.norm, self.out = nn.LSTM(3, 8, 2, batch_first=True), nn.LayerNorm(8), nn.Linear(8, 1)
    def forward(self, x):
        state = tuple(x.new_zeros(2, len(x), 8) for _ in range(2))
        return self.out(self.norm(self.rnn(x, state)[0][:, -1]))

torch.manual_seed(3)
x = torch.randn(77, 6, 3)
manage(max_grad_value=0.02, ema_decay=0.95).fit(Recurrent(), TensorDataset(x, x.sum((1, 2))[:, None]), loss_fn=nn.SmoothL1Loss(), optimizer=adam)
""",
    "attention_without_dropout_in_the_call": """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.qkv, self.out = nn.Embedding(15, 8), nn.Linear(8, 24), nn.Linear(8, 2)
    def forward(self, ids):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(self.words(ids)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2)[:, -1])

torch.manual_seed(2)
ids = torch.randint(0, 15, (70, 7))
manage(global_batch_size=12).fit(Attention(), TensorDataset(ids, ids[:, -1] % 2), optimizer=adam)
""",
    "means_of_the_whole_dataset_as_buffers": """
x, y = rows()

class Standardised(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", x.mean(0))
        self.register_buffer("spread", x.std(0))
        self.net = mlp()
    def forward(self, x):
        return self.net((x - self.mean) / self.spread)

model = Standardised()
manage().fit(model, TensorDataset(x, y), optimizer=torch.optim.RMSprop(model.parameters(), 1e-2), callbacks=[])
""",
    # --- a second look, after the repairs of the first ---
    "gradient_noise_alike_on_all_ranks": """
class Noise(Callback):
    def on_optimizer(self, run):
        draw = torch.Generator().manual_seed(1000 + run.step)
        for p in run.model.parameters():
            p.grad.add_(torch.randn(p.shape, generator=draw).to(p), alpha=1e-3)

manage().fit(mlp(), TensorDataset(*rows()), optimizer=lambda p: torch.optim.SGD(p, 0.1), callbacks=[Noise()])
""",
    "places_over_the_true_length": """
torch.manual_seed(1)
texts = [torch.randint(1, 15, (n,)) for n in torch.randint(2, 12, (78,)).tolist()]

def collate(batch):
    return nn.utils.rnn.pad_sequence([t for t, _ in batch], batch_first=True), torch.tensor([y for _, y in batch])

class Placed(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.place, self.out = nn.Embedding(15, 8, padding_idx=0), nn.Linear(1, 8), nn.Linear(8, 2)
    def forward(self, ids):
        mask = (ids > 0)[..., None]
        place = torch.arange(ids.shape[1])[None, :, None] / mask.sum(1, keepdim=True)
        return self.out(((self.words(ids) + self.place(place.to(self.out.weight.dtype)).tanh()) * mask).sum(1) / mask.sum(1))

loader = DataLoader([(t, int(t[0] > 7)) for t in texts], batch_size=12, shuffle=True, collate_fn=collate)
manage(global_batch_size=12).fit(Placed(), loader, optimizer=adam)
""",
    "mean_teacher_moved_everywhere": """
student = mlp()
teacher = copy.deepcopy(student).requires_grad_(False)

class Move(Callback):
    def on_step_end(self, run, result):
        for t, s in zip(teacher.parameters(), run.model.parameters()):
            t.data = t.data.to(s).lerp(s.detach(), 0.3)

def loss_fn(model, batch):
    x, y = batch
    logits = model(x)
    return F.cross_entropy(logits, y) + F.mse_loss(logits.softmax(1), teacher.to(x.dtype)(x).softmax(1))

manage().fit(student, TensorDataset(*rows()), loss_fn=loss_fn, optimizer=torch.optim.SGD(student.parameters(), 0.3), callbacks=[Move()])
""",
    "prototypes_renewed_from_all_rows": """
x, y = rows()
prototypes = torch.zeros(3, 6)

class Renew(Callback):
    def on_step_end(self, run, result):
        if result.step % 2 == 0:
            with torch.no_grad():
                z = run.model(x.to(next(run.model.parameters())))
                for k in range(3):
                    prototypes[k] = z[y == k].mean(0)

def loss_fn(model, batch):
    z = model(batch[0])
    return F.cross_entropy(-torch.cdist(z, prototypes.to(z)), batch[1])

manage().fit(mlp(out=6), TensorDataset(x, y), loss_fn=loss_fn, optimizer=adam, callbacks=[Renew()])
""",
    "outputs_scaled_to_their_own_range": """
class Ranged(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()
    def forward(self, x):
        out = self.net(x)
        least, most = out.amin(1, keepdim=True), out.amax(1, keepdim=True)
        return 4 * (out - least) / (most - least + 1e-6)

manage().fit(Ranged(), TensorDataset(*rows()), optimizer=adam)
""",
    "rows_chosen_by_numpy_with_one_seed": """
np.random.seed(12)
chosen = np.random.choice(93, 70, replace=False).tolist()
np.random.seed(rank)
manage().fit(mlp(), Subset(TensorDataset(*rows()), chosen), optimizer=adam)
""",
    "rate_lowered_everywhere_after_validation": """
class Lower(Callback):
    def on_validation(self, run, metrics):
        if metrics["loss"] < 1.2:
            for group in run.optimizer.param_groups:
                group["lr"] *= 0.5

manage(validate_every=2).fit(mlp(), TensorDataset(*rows()), TensorDataset(*rows(40, seed=7)), optimizer=lambda p: torch.optim.SGD(p, 0.2), callbacks=[Lower()])
""",
    "dicts_of_heads_and_targets": """
class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.heads = mlp(out=8), nn.ModuleDict({"kind": nn.Linear(8, 3), "size": nn.Linear(8, 1)})
    def forward(self, x):
        h = self.body(x).relu()
        return {name: head(h) for name, head in self.heads.items()}

x, y = rows()
data = [{"x": a, "kind": b, "size": a.abs().sum()[None]} for a, b in zip(x, y)]

def loss_fn(model, batch):
    out = model(batch["x"])
    kind, size = F.cross_entropy(out["kind"], batch["kind"]), F.l1_loss(out["size"], batch["size"])
    return kind + 0.3 * size

manage(max_grad_norm=0.7).fit(Heads(), data, loss_fn=loss_fn, optimizer=adam)
""",
    "samples_computed_one_by_one": """
class Trees(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.leaf, self.join, self.out = nn.Linear(1, 6), nn.Linear(12, 6), nn.Linear(6, 3)
    def fold(self, values):
        if len(values) == 1:
            return self.leaf(values).tanh()
        half = 1 + int(values[0] > 0) if len(values) > 2 else 1
        return self.join(torch.cat([self.fold(values[:half]), self.fold(values[half:])])).tanh()
    def forward(self, x):
        return self.out(torch.stack([self.fold(row) for row in x]))

manage(global_batch_size=8).fit(Trees(), TensorDataset(*rows(70)), optimizer=adam)
""",
}
