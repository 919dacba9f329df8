# ruff: noqa: E501
"""Scripts for `seeded_bugs.py` written blind to the diagnosis.

As in the other files: BUGS maps a name to what the cause must say and to the script, CORRECT a name to the script.
"""

from __future__ import annotations

HEADER = """
import argparse, copy, math, os, random, time
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import *
from multi_gpu_training import Callback, MultiGPUConfig, MultiGPUTrainingManager

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
torch.manual_seed(21)
N = 98
A, B = torch.randn(N, 5), torch.randint(0, 3, (N,))
V = (A[:, :1] * A[:, 1:2]).tanh()

def mlp(out=3, *middle):
    return nn.Sequential(nn.Linear(5, 10), *middle, nn.SiLU(), nn.Linear(10, out))

def sgd(p):
    return torch.optim.SGD(p, lr=0.05, momentum=0.9)

def go(model, data, loss=None, optimizer=sgd, val=None, **more):
    names = ("callbacks", "scheduler", "augment", "eval_fn", "states")
    extra = {n: more.pop(n) for n in names if n in more}
    config = MultiGPUConfig(**{"global_batch_size": 15, "epochs": 2, **more})
    return MultiGPUTrainingManager(config).fit(model, data, val, loss_fn=loss, optimizer=optimizer, **extra)

def own(model, data, loss=None, optimizer=sgd, **more):
    manager = MultiGPUTrainingManager(MultiGPUConfig(**{"global_batch_size": 15, "epochs": 2, **more}))
    model, loader, _ = manager.setup_training(model, data, loss_fn=loss, optimizer=optimizer)
    return manager, model, loader
"""

DATA = r"data per rank|a sample differs|samples? (are|is) not|other samples|generator"
UNWEIGHTED = r"not weighted|weighted wrongly"
WHOLE = r"over the batch as a whole|in-batch pairs|mean of means|mixes the samples|pairs"
NOISE = r"draws random numbers|draws from numpy|generator of its own|not seeded"
BUFFER = r"buffer .* is not synchronised|mixes the samples"
BY_WORLD = r"number of ranks|world size"
CHANGED = r"parameter .* is changed"
PER_RANK_CLIP = r"clipped per rank|changed per rank|per rank, before"
LEFT = r"a rank has left|ranks? .* (left|stopped|hang)|control flow"

BUGS: dict[str, tuple[str, str]] = {
    # Data
    "order_drawn_per_process": (
        DATA,
        """
class Shuffled(Dataset):
    def __init__(self):
        self.order = np.random.RandomState(100 + RANK).permutation(N)
    def __len__(self):
        return N
    def __getitem__(self, i):
        return A[self.order[i]], B[self.order[i]]
go(mlp(), Shuffled(), nn.CrossEntropyLoss())
""",
    ),
    "clock_in_the_augmentation": (
        DATA + r"|again|does not repeat|not seeded",
        """
class Jittered(Dataset):
    def __len__(self):
        return N
    def __getitem__(self, i):
        rng = np.random.default_rng(time.time_ns())
        return A[i] + 0.1 * torch.from_numpy(rng.normal(size=5)).float(), B[i]
go(mlp(), Jittered(), nn.CrossEntropyLoss())
""",
    ),
    "cache_of_the_first_rank_only": (
        DATA,
        """
class Cached(Dataset):
    '''The main process has the cleaned labels, the others read the raw ones.'''
    def __init__(self):
        self.labels = B.clone()
        if RANK == 0:
            self.labels[::6] = 0
    def __len__(self):
        return N
    def __getitem__(self, i):
        return A[i], self.labels[i]
go(mlp(), Cached(), nn.CrossEntropyLoss())
""",
    ),
    "difficulty_by_the_ranks_own_loss": (
        DATA,
        """
class Curriculum(Dataset):
    level = 0.2
    def __len__(self):
        return N
    def __getitem__(self, i):
        return A[i] * self.level, B[i]
data = Curriculum()
class Harder(Callback):
    def on_step_end(self, run, result):
        data.level = min(1.0, 0.2 + 0.5 * float(result.loss))
go(mlp(), data, nn.CrossEntropyLoss(), callbacks=[Harder()])
""",
    ),
    "inputs_scaled_by_the_batch_in_the_loop": (
        DATA + r"|mixes|statistics|as a whole",
        """
manager, model, loader = own(mlp(), TensorDataset(A * 4 - 1, B), nn.CrossEntropyLoss())
for epoch in range(2):
    for x, y in loader:
        x = (x - x.amin(0)) / (x.amax(0) - x.amin(0) + 1e-3)
        manager.trainer.train_step((x, y))
manager.finish()
""",
    ),
    # Weights of means
    "caption_mean_over_words": (
        UNWEIGHTED,
        """
words = torch.randint(1, 18, (N, 9))
words[torch.arange(9) >= torch.randint(2, 10, (N, 1))] = 0
class Captioner(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(18, 7), nn.GRU(7, 9, batch_first=True), nn.Linear(9, 18)
    def forward(self, x):
        return self.head(self.rnn(self.embed(x))[0])
def loss(model, batch):
    (w,) = batch
    return F.cross_entropy(model(w[:, :-1]).transpose(1, 2), w[:, 1:], ignore_index=0)
go(Captioner(), TensorDataset(words), loss)
""",
    ),
    "masked_pixels_mse": (
        UNWEIGHTED,
        """
pixels = torch.randn(N, 1, 6, 6)
mask = (torch.rand(N, 1, 6, 6) > torch.rand(N, 1, 1, 1)).float()
net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 3, padding=1))
def inpaint(model, batch):
    x, m = batch
    return ((model(x * (1 - m)) - x) ** 2 * m).sum() / m.sum()
go(net, TensorDataset(pixels, mask), inpaint)
""",
    ),
    "class_weights_in_a_hand_written_mean": (
        UNWEIGHTED,
        """
factor = torch.tensor([0.1, 1.0, 6.0])
def weighted(model, batch):
    x, y = batch
    w = factor[y]
    return (F.cross_entropy(model(x), y, reduction="none") * w).sum() / w.sum()
go(mlp(), TensorDataset(A, B), weighted)
""",
    ),
    "nodes_of_graphs_averaged": (
        UNWEIGHTED,
        """
sizes = torch.randint(1, 8, (N,))
nodes = torch.randn(N, 8, 5)
class Nodes(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(5, 10), nn.Linear(10, 2)
    def forward(self, x, there):
        h = self.one(x) * there[..., None]
        h = torch.tanh(h + h.sum(1, keepdim=True) / there.sum(1)[:, None, None])
        return self.two(h)
def loss(model, batch):
    x, n = batch
    there = torch.arange(8) < n[:, None]
    want = (x[..., 0] > x[..., 1]).long()
    return F.cross_entropy(model(x, there.float())[there], want[there])
go(Nodes(), TensorDataset(nodes, sizes), loss)
""",
    ),
    # Losses of the batch as a whole
    "positive_weight_of_the_batch": (
        WHOLE,
        """
def rare(model, batch):
    x, y = batch
    hot = (y == 2).float()[:, None]
    weight = (1 - hot).sum() / hot.sum().clamp(min=1)
    return F.binary_cross_entropy_with_logits(model(x), hot, pos_weight=weight)
go(mlp(1), TensorDataset(A, B), rare)
""",
    ),
    "advantages_normalised_in_the_batch": (
        WHOLE,
        """
reward = V[:, 0] + 2
def reinforce(model, batch):
    x, action, r = batch
    advantage = (r - r.mean()) / (r.std() + 1e-6)
    log_p = model(x).log_softmax(1).gather(1, action[:, None])[:, 0]
    return -(advantage * log_p).mean()
go(mlp(), TensorDataset(A, B, reward), reinforce)
""",
    ),
    "hard_examples_top_third": (
        WHOLE,
        """
def ohem(model, batch):
    x, y = batch
    each = F.cross_entropy(model(x), y, reduction="none")
    return each.topk(max(1, len(each) // 3)).values.mean()
go(mlp(), TensorDataset(A, B), ohem)
""",
    ),
    "nt_xent_of_two_views": (
        WHOLE,
        """
views = torch.stack([A + 0.05 * torch.randn(N, 5), A + 0.05 * torch.randn(N, 5)], 1)
def nt_xent(model, batch):
    (v,) = batch
    a, b = F.normalize(model(v[:, 0]), dim=1), F.normalize(model(v[:, 1]), dim=1)
    logits = a @ b.T / 0.2
    return F.cross_entropy(logits, torch.arange(len(a)))
go(mlp(6), TensorDataset(views), nt_xent)
""",
    ),
    "mmd_between_domains": (
        WHOLE,
        """
other = A * 1.5 + 0.5
def mmd(a, b):
    k = lambda u, v: torch.exp(-torch.cdist(u, v).square() / 4).mean()
    return k(a, a) + k(b, b) - 2 * k(a, b)
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(5, 8), nn.Linear(8, 3)
def loss(model, batch):
    x, o, y = batch
    f, g = model.body(x).tanh(), model.body(o).tanh()
    return F.cross_entropy(model.head(f), y) + mmd(f, g)
go(Two(), TensorDataset(A, other, B), loss)
""",
    ),
    "soft_f1": (
        WHOLE,
        """
def soft_f1(model, batch):
    x, y = batch
    p, t = model(x).softmax(1), F.one_hot(y, 3).float()
    hit = (p * t).sum(0)
    return 1 - (2 * hit / (p.sum(0) + t.sum(0))).mean()
go(mlp(), TensorDataset(A, B), soft_f1)
""",
    ),
    "psnr_of_the_batch": (
        WHOLE,
        """
def psnr(model, batch):
    x, v = batch
    return 10 * torch.log10(F.mse_loss(model(x), v))
go(mlp(1), TensorDataset(A, V), psnr)
""",
    ),
    # Inside the model
    "batchnorm_in_unet": (
        r"BatchNorm .* normalises each rank",
        """
class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU())
        self.up = nn.ConvTranspose2d(4, 4, 2, 2)
        self.out = nn.Conv2d(5, 2, 1)
    def forward(self, x):
        return self.out(torch.cat([x, self.up(self.down(x))], 1))
images = torch.randn(60, 1, 6, 6)
go(UNet(), TensorDataset(images, (images[:, 0] > 0.3).long()), nn.CrossEntropyLoss())
""",
    ),
    "own_norm_by_f_batch_norm": (
        r"mixes the samples|BatchNorm|buffer",
        """
class Norm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.register_buffer("mean", torch.zeros(n))
        self.register_buffer("var", torch.ones(n))
        self.scale = nn.Parameter(torch.ones(n))
    def forward(self, x):
        return F.batch_norm(x, self.mean, self.var, self.scale, None, self.training)
go(mlp(3, Norm(10)), TensorDataset(A, B), nn.CrossEntropyLoss())
""",
    ),
    "minibatch_standard_deviation": (
        r"mixes the samples",
        """
class Deviation(nn.Module):
    def forward(self, x):
        return torch.cat([x, x.std(0).mean().expand(len(x), 1)], 1)
net = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), Deviation(), nn.Linear(10, 3))
go(net, TensorDataset(A, B), nn.CrossEntropyLoss())
""",
    ),
    "range_observer": (
        BUFFER,
        """
class Observed(nn.Module):
    '''Fake quantisation by the largest activation seen so far.'''
    def __init__(self):
        super().__init__()
        self.register_buffer("top", torch.tensor(0.1))
    def forward(self, x):
        if self.training:
            self.top.copy_(torch.maximum(self.top * 0.9, x.detach().abs().max()))
        return x / self.top.clone()
go(mlp(3, Observed()), TensorDataset(A, B), nn.CrossEntropyLoss())
""",
    ),
    "class_prior_counted_in_a_buffer": (
        BUFFER,
        """
class Adjusted(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.register_buffer("prior", torch.ones(3))
    def forward(self, x):
        return self.net(x) + self.prior.log()
def loss(model, batch):
    x, y = batch
    out = F.cross_entropy(model(x), y)
    model.prior.mul_(0.95).add_(F.one_hot(y, 3).float().mean(0) * 0.05)
    return out
go(Adjusted(), TensorDataset(A, B), loss)
""",
    ),
    "randomised_leaky_relu": (
        NOISE,
        """
net = nn.Sequential(nn.Linear(5, 12), nn.RReLU(0.0, 0.9), nn.Linear(12, 3))
go(net, TensorDataset(A, B), nn.CrossEntropyLoss())
""",
    ),
    "gumbel_gates": (
        NOISE,
        """
class Gates(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.a, self.b = nn.Linear(5, 2), nn.Linear(5, 3), nn.Linear(5, 3)
    def forward(self, x):
        g = F.gumbel_softmax(self.gate(x), tau=0.7)
        return g[:, :1] * self.a(x) + g[:, 1:] * self.b(x)
go(Gates(), TensorDataset(A, B), nn.CrossEntropyLoss())
""",
    ),
    "loss_scaled_by_its_own_average": (
        r"keeps state|depends on the rank|own samples|again|as a whole",
        """
class Balanced:
    average = 1.0
    def __call__(self, model, batch):
        x, y = batch
        loss = F.cross_entropy(model(x), y)
        self.average = 0.9 * self.average + 0.1 * float(loss.detach())
        return loss / self.average
go(mlp(), TensorDataset(A, B), Balanced())
""",
    ),
    # Rates and settings
    "rate_times_root_of_world": (
        BY_WORLD,
        """
go(mlp(), TensorDataset(A, B), nn.CrossEntropyLoss(), lambda p: torch.optim.AdamW(p, lr=3e-4 * WORLD ** 0.5))
""",
    ),
    "cosine_over_steps_per_rank": (
        BY_WORLD,
        """
length = 2 * N // (15 * WORLD)
go(mlp(), TensorDataset(A, B), nn.CrossEntropyLoss(), scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, max(1, length)))
""",
    ),
    "decay_shared_out_over_ranks": (
        BY_WORLD,
        """
go(mlp(), TensorDataset(A, B), nn.CrossEntropyLoss(), lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.3 / WORLD))
""",
    ),
    "gradients_averaged_once_more": (
        r"number of ranks|world size",
        """
class Average(Callback):
    def on_optimizer(self, run):
        for p in run.model.parameters():
            p.grad /= WORLD
go(mlp(), TensorDataset(A, B), nn.CrossEntropyLoss(), callbacks=[Average()])
""",
    ),
    "sum_over_a_constant_batch": (
        r"sum over the samples|world size|number of ranks|own share|its size",
        """
def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum") / 15
go(mlp(), TensorDataset(A, B), loss)
""",
    ),
    "normalised_gradients_by_hook": (
        PER_RANK_CLIP,
        """
net = mlp()
for p in net.parameters():
    p.register_hook(lambda g: g / (g.norm() + 1e-8) * 0.1)
go(net, TensorDataset(A, B), nn.CrossEntropyLoss())
""",
    ),
    # Weights
    "dead_units_revived_by_own_activity": (
        CHANGED,
        """
net = mlp()
class Revive(Callback):
    def on_step_end(self, run, result):
        if float(result.loss) > 1.1:
            with torch.no_grad():
                net[0].bias[int(torch.argmin(net[0].bias))] += 0.05
go(net, TensorDataset(A, B), nn.CrossEntropyLoss(), callbacks=[Revive()])
""",
    ),
    "average_copied_back_on_the_main_rank": (
        CHANGED,
        """
net = mlp()
slow = copy.deepcopy(net)
class Lookahead(Callback):
    def on_step_end(self, run, result):
        if RANK == 0 and result.step % 3 == 0:
            with torch.no_grad():
                for s, p in zip(slow.parameters(), net.parameters()):
                    s.lerp_(p, 0.5)
                    p.copy_(s)
        elif WORLD == 1:
            pass
go(net, TensorDataset(A, B), nn.CrossEntropyLoss(), callbacks=[Lookahead()])
""",
    ),
    "weights_moved_by_hand_after_own_backward": (
        CHANGED + r"|past the wrapper",
        """
manager, model, loader = own(mlp(), TensorDataset(A, B), nn.CrossEntropyLoss())
for epoch in range(2):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads):
                p -= 0.05 * g
        manager.trainer.train_step((x, y))
manager.finish()
""",
    ),
    # Control flow, metrics
    "stops_when_its_own_loss_is_low": (
        LEFT,
        """
manager, model, loader = own(mlp(), TensorDataset(A, B), nn.CrossEntropyLoss())
done = False
for epoch in range(2):
    for batch in loader:
        result = manager.trainer.train_step(batch)
        if float(result.loss) < 1.12 and result.step > 2:
            done = True
            break
    if done:
        break
manager.finish()
""",
    ),
    "accuracy_per_batch_averaged": (
        r"mean of means",
        """
def eval_fn(model, batch, metrics):
    x, y = batch
    out = model(x)
    metrics.add("loss", F.cross_entropy(out, y, reduction="sum"), len(y))
    metrics.add("accuracy", (out.argmax(1) == y).double().mean(), 1)
go(mlp(), TensorDataset(A, B), nn.CrossEntropyLoss(), val=TensorDataset(A[:37], B[:37]), eval_fn=eval_fn)
""",
    ),
    "threshold_chosen_on_own_predictions": (
        r"metric .* (mean of means|depends)|mean of means",
        """
def eval_fn(model, batch, metrics):
    x, y = batch
    score = model(x).softmax(1)[:, 2]
    cut = score.median()
    metrics.add("loss", F.cross_entropy(model(x), y, reduction="sum"), len(y))
    metrics.add("hits", ((score > cut) == (y == 2)).sum(), len(y))
go(mlp(), TensorDataset(A, B), nn.CrossEntropyLoss(), val=TensorDataset(A[:37], B[:37]), eval_fn=eval_fn)
""",
    ),
}

CORRECT: dict[str, str] = {
    "script_with_arguments": """
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-2)
    args = parser.parse_args()
    go(mlp(), TensorDataset(A, B), nn.CrossEntropyLoss(), lambda p: torch.optim.AdamW(p, lr=args.lr))
if __name__ == "__main__":
    main()
""",
    "regression_defaults": """
go(mlp(1), TensorDataset(A, V))
""",
    "accumulation_and_clipping": """
go(mlp(), TensorDataset(A, B), nn.CrossEntropyLoss(), gradient_accumulation_steps=2, max_grad_norm=0.2)
""",
    "values_clipped": """
go(mlp(), TensorDataset(A, B), nn.CrossEntropyLoss(), max_grad_value=0.01)
""",
    "one_cycle": """
go(mlp(), TensorDataset(A, B), nn.CrossEntropyLoss(), scheduler=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=40))
""",
    "step_lr_by_epoch": """
go(mlp(), TensorDataset(A, B), nn.CrossEntropyLoss(), scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5), scheduler_unit="epoch")
""",
    "plateau": """
go(mlp(), TensorDataset(A, B), nn.CrossEntropyLoss(), val=TensorDataset(A[:29], B[:29]), scheduler=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0))
""",
    "warm_up_and_cosine_of_config": """
go(mlp(), TensorDataset(A, B), nn.CrossEntropyLoss(), None, schedule="cosine", warmup_steps=3)
""",
    "synchronised_batchnorm": """
go(mlp(3, nn.BatchNorm1d(10)), TensorDataset(A, B), nn.CrossEntropyLoss(), sync_bn=True)
""",
    "group_norm_cnn": """
net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
images = torch.randn(50, 1, 6, 6)
go(net, TensorDataset(images, (images.mean((1, 2, 3)) > 0).long()), nn.CrossEntropyLoss())
""",
    "words_weighted": """
words = torch.randint(1, 18, (N, 9))
words[torch.arange(9) >= torch.randint(2, 10, (N, 1))] = 0
net = nn.Sequential(nn.Embedding(18, 7), nn.Linear(7, 18))
def loss(model, batch):
    (w,) = batch
    mean = F.cross_entropy(model(w[:, :-1]).transpose(1, 2), w[:, 1:], ignore_index=0)
    return mean, (w[:, 1:] != 0).sum()
go(net, TensorDataset(words), loss)
""",
    "metrics_beside_the_loss": """
def loss(model, batch):
    x, y = batch
    out = model(x)
    return F.cross_entropy(out, y), None, {"right": ((out.argmax(1) == y).sum(), len(y))}
go(mlp(), TensorDataset(A, B), loss)
""",
    "sampler_with_own_generator": """
sampler = WeightedRandomSampler(torch.arange(1, N + 1).double(), 60, generator=torch.Generator().manual_seed(4))
go(mlp(), DataLoader(TensorDataset(A, B), batch_size=15, sampler=sampler), nn.CrossEntropyLoss())
""",
    "own_batch_sampler": """
class Blocks(Sampler):
    def __iter__(self):
        for start in range(0, N, 14):
            yield list(range(start, min(start + 14, N)))
    def __len__(self):
        return 7
go(mlp(), DataLoader(TensorDataset(A, B), batch_sampler=Blocks()), nn.CrossEntropyLoss(), global_batch_size=None)
""",
    "padded_and_masked": """
lengths = torch.randint(1, 9, (N,))
series = torch.randn(N, 8, 5)
class Ragged(Dataset):
    def __len__(self):
        return N
    def __getitem__(self, i):
        return series[i, : lengths[i]], B[i]
def collate(items):
    x = nn.utils.rnn.pad_sequence([a for a, _ in items], True)
    n = torch.tensor([len(a) for a, _ in items])
    return x, n, torch.stack([b for _, b in items])
class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(5, 8), nn.Linear(8, 3)
    def forward(self, x, n):
        there = (torch.arange(x.shape[1]) < n[:, None])[..., None]
        return self.two((self.one(x).tanh() * there).sum(1) / n[:, None])
go(Pooled(), DataLoader(Ragged(), batch_size=15, shuffle=True, collate_fn=collate), nn.CrossEntropyLoss())
""",
    "plain_stream": """
class Stream(IterableDataset):
    def __iter__(self):
        for i in range(N):
            yield A[i], B[i]
go(mlp(), Stream(), nn.CrossEntropyLoss())
""",
    "batches_from_the_dataset": """
class Batches(Dataset):
    def __len__(self):
        return 7
    def __getitem__(self, i):
        return A[i * 14 : i * 14 + 14], B[i * 14 : i * 14 + 14]
go(mlp(), DataLoader(Batches(), batch_size=None), nn.CrossEntropyLoss(), global_batch_size=None)
""",
    "loop_over_epochs": """
manager, model, loader = own(mlp(), TensorDataset(A, B), nn.CrossEntropyLoss())
for epoch in range(2):
    manager.train_epoch(loader, epoch)
manager.finish()
""",
    "loop_over_batches_with_user_schedule": """
net = mlp()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
manager, model, loader = own(net, TensorDataset(A, B), nn.CrossEntropyLoss(), optimizer)
for epoch in range(2):
    for batch in loader:
        result = manager.trainer.train_step(batch)
        schedule.step()
manager.finish()
""",
    "exponential_average": """
go(mlp(), TensorDataset(A, B), nn.CrossEntropyLoss(), val=TensorDataset(A[:30], B[:30]), ema_decay=0.9)
""",
    "stochastic_average": """
go(mlp(), TensorDataset(A, B), nn.CrossEntropyLoss(), val=TensorDataset(A[:30], B[:30]), swa_start=3, swa_every=2)
""",
    "early_stopping_by_validation": """
go(mlp(), TensorDataset(A, B), nn.CrossEntropyLoss(), val=TensorDataset(A[:30], B[:30]), early_stopping_patience=1, epochs=4)
""",
    "validation_inside_epochs": """
go(mlp(), TensorDataset(A, B), nn.CrossEntropyLoss(), val={"a": TensorDataset(A[:30], B[:30]), "b": TensorDataset(A[30:37], B[30:37])}, validate_every=3, max_steps=8)
""",
    "weight_norm_and_tied": """
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.mid = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.out = nn.Linear(6, 9, bias=False)
        self.out.weight = self.embed.weight
    def forward(self, x):
        return self.out(torch.tanh(self.mid(self.embed(x))))
ids = torch.randint(0, 9, (N,))
go(Tied(), TensorDataset(ids, (ids * 2 + 1) % 9), nn.CrossEntropyLoss())
""",
    "frozen_backbone_in_eval": """
net = mlp(3, nn.BatchNorm1d(10))
net[0].requires_grad_(False)
class Keep(Callback):
    def on_epoch_begin(self, run, epoch):
        net[1].eval()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net
    def train(self, mode=True):
        super().train(mode)
        self.net[1].eval()
        return self
    def forward(self, x):
        return self.net(x)
go(Net(), TensorDataset(A, B), nn.CrossEntropyLoss(), lambda p: torch.optim.SGD([q for q in p if q.requires_grad], lr=0.1))
""",
    "unfrozen_by_a_callback": """
net = mlp()
net[0].requires_grad_(False)
class Unfreeze(Callback):
    def on_step_begin(self, run, step):
        if run.step == 3:
            net[0].requires_grad_(True)
go(net, TensorDataset(A, B), nn.CrossEntropyLoss(), callbacks=[Unfreeze()])
""",
    "rate_set_by_a_callback": """
class Rate(Callback):
    def on_step_end(self, run, result):
        run.optimizer.param_groups[0]["lr"] = 0.1 / (1 + result.step)
go(mlp(), TensorDataset(A, B), nn.CrossEntropyLoss(), callbacks=[Rate()])
""",
    "sparse_bag": """
bags = torch.randint(0, 30, (N, 4))
class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(30, 6, sparse=True), nn.Linear(6, 3)
    def forward(self, x):
        return self.head(self.bag(x))
go(Bag(), TensorDataset(bags, B), nn.CrossEntropyLoss())
""",
    "adafactor": """
go(mlp(), TensorDataset(A, B), nn.CrossEntropyLoss(), lambda p: torch.optim.Adafactor(p, lr=0.02))
""",
    "lion": """
class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, beta=0.9):
        super().__init__(params, dict(lr=lr, beta=beta))
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    p.add_(torch.tanh(100 * (0.9 * m + 0.1 * p.grad)), alpha=-group["lr"])
                    m.lerp_(p.grad, 1 - group["beta"])
go(mlp(), TensorDataset(A, B), nn.CrossEntropyLoss(), lambda p: Lion(p, 0.01))
""",
    "groups_and_lambda_schedules": """
net = mlp()
optimizer = torch.optim.AdamW([{"params": net[0].parameters(), "lr": 1e-3}, {"params": net[2].parameters(), "lr": 1e-2, "weight_decay": 0}])
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda s: 0.95 ** s, lambda s: 1 / (1 + s)])
go(net, TensorDataset(A, B), nn.CrossEntropyLoss(), optimizer, scheduler=schedule)
""",
    "augment_on_the_device": """
def augment(batch, rnd):
    x, y = batch
    return torch.where(rnd.uniform(1) < 0.5, -x, x) + 0.05 * rnd.normal(5), y
go(mlp(), TensorDataset(A, B), nn.CrossEntropyLoss(), augment=augment)
""",
    "noise_in_getitem": """
class Noisy(Dataset):
    def __len__(self):
        return N
    def __getitem__(self, i):
        return A[i] + 0.1 * torch.randn(5) + random.random() + float(np.random.rand()), B[i]
go(mlp(), Noisy(), nn.CrossEntropyLoss())
""",
    "dropout": """
go(mlp(3, nn.Dropout(0.4)), TensorDataset(A, B), nn.CrossEntropyLoss())
""",
    "small_encoder": """
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.embed, self.body, self.head = nn.Linear(1, 8), nn.TransformerEncoder(layer, 1), nn.Linear(8, 3)
    def forward(self, x):
        return self.head(self.body(self.embed(x[..., None])).mean(1))
go(Encoder(), TensorDataset(A, B), nn.CrossEntropyLoss(), lambda p: torch.optim.AdamW(p, lr=1e-3))
""",
    "checkpointed_activations": """
net = nn.Sequential(*[nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3)], nn.Linear(5, 3))
go(net, TensorDataset(A, B), nn.CrossEntropyLoss(), use_gradient_checkpointing=True)
""",
    "bert": """
from transformers import BertConfig, BertForSequenceClassification
ids = torch.randint(5, 40, (40, 8))
mask = (torch.arange(8) < torch.randint(2, 9, (40, 1))).long()
class Texts(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, i):
        return {"input_ids": ids[i], "attention_mask": mask[i], "labels": ids[i, 0] % 2}
net = BertForSequenceClassification(BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16))
go(net, Texts(), None, lambda p: torch.optim.AdamW(p, lr=1e-3))
""",
    "distilled_from_a_teacher": """
teacher = mlp(3, nn.BatchNorm1d(10)).eval().requires_grad_(False)
def loss(model, batch):
    with torch.no_grad():
        soft = teacher(batch[0]).softmax(1)
    return F.cross_entropy(model(batch[0]), soft)
go(mlp(), TensorDataset(A, B), loss)
""",
    "learned_temperature": """
scale = nn.Parameter(torch.tensor(1.0))
net = mlp()
def loss(model, batch):
    return F.cross_entropy(model(batch[0]) * scale, batch[1])
go(net, TensorDataset(A, B), loss, torch.optim.SGD([*net.parameters(), scale], lr=0.1))
""",
    "weighted_metrics": """
def eval_fn(model, batch, metrics):
    x, y = batch
    each = F.cross_entropy(model(x), y, reduction="none")
    metrics.add("loss", each.sum(), len(y))
    metrics.add("late", (each * (y + 1)).sum(), (y + 1).sum())
    metrics.add_predictions(model(x).argmax(1), y, classes=3)
go(mlp(), TensorDataset(A, B), nn.CrossEntropyLoss(), val=DataLoader(TensorDataset(A[:31], B[:31]), batch_size=4), eval_fn=eval_fn)
""",
    "persistent_loader_workers": """
go(mlp(), DataLoader(TensorDataset(A, B), batch_size=15, shuffle=True, num_workers=2, persistent_workers=True), nn.CrossEntropyLoss())
""",
    "penalty_on_input_gradients": """
def loss(model, batch):
    x = batch[0].clone().requires_grad_()
    out = model(x)
    (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.cross_entropy(out, batch[1]) + 0.1 * g.square().sum(1).mean()
go(mlp(), TensorDataset(A, B), loss)
""",
    "model_from_a_function": """
def build():
    torch.manual_seed(4)
    return mlp()
go(build, TensorDataset(A, B), nn.CrossEntropyLoss())
""",
    "main_rank_prints_and_logs": """
class Say(Callback):
    def on_step_end(self, run, result):
        if RANK == 0:
            norm = sum(float(p.square().sum()) for p in run.model.parameters())
            print("norm", norm)
    def on_epoch_end(self, run, epoch, metrics):
        run.log(epoch_loss=metrics["loss"])
go(mlp(), TensorDataset(A, B), nn.CrossEntropyLoss(), callbacks=[Say()])
""",
    "weights_clamped_by_all": """
class Clamp(Callback):
    def on_step_end(self, run, result):
        with torch.no_grad():
            for p in run.model.parameters():
                p.clamp_(-0.3, 0.3)
go(mlp(), TensorDataset(A, B), nn.CrossEntropyLoss(), callbacks=[Clamp()])
""",
    "spectral_norm_and_leaky": """
net = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 10)), nn.LeakyReLU(0.2), nn.Linear(10, 1))
def hinge(model, batch):
    x, y = batch
    return F.relu(1 - model(x)[:, 0] * (y - 1).sign()).mean()
go(net, TensorDataset(A, B), hinge)
""",
    "weights_of_zero": """
keep = (torch.rand(N) > 0.6).float()
keep[:15] = 0
def loss(model, batch):
    x, y, k = batch
    each = F.cross_entropy(model(x), y, reduction="none") * k
    return each.sum() / k.sum().clamp(min=1), k.sum()
go(mlp(), TensorDataset(A, B, keep), loss, lambda p: torch.optim.AdamW(p, lr=1e-2), shuffle=False)
""",
    "average_kept_in_states": """
from torch.optim.swa_utils import AveragedModel
net = mlp()
average = AveragedModel(net)
class Average(Callback):
    def on_step_end(self, run, result):
        average.update_parameters(run.model)
go(net, TensorDataset(A, B), nn.CrossEntropyLoss(), callbacks=[Average()], states={"average": average})
""",
}

# Hooks on parameters get the gradient of the whole step by now: no bugs any more.
for _name in ("normalised_gradients_by_hook",):
    CORRECT[_name] = BUGS.pop(_name)[1]
