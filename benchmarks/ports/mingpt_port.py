"""minGPT trainer.py: samples drawn with replacement, ignored targets, two groups of weight decay,
clipping, max_iters. Its sampler of 1e10 samples is cut to those that are used."""

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset, Sampler

from multi_gpu_training import MultiGPUTrainingManager

BATCH, STEPS, VOCAB, BLOCK = 6, 9, 11, 7


class Sort(Dataset):
    def __init__(self):
        self.data = torch.randint(
            VOCAB, (40, BLOCK + 1), generator=torch.Generator().manual_seed(0)
        )

    def __len__(self):
        return 40

    def __getitem__(self, i):
        y = self.data[i, 1:].clone()
        y[: i % 4] = -1
        return self.data[i, :-1], y


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, 8), nn.Embedding(BLOCK, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, bias=False)
        self.ln, self.head = nn.LayerNorm(8), nn.Linear(8, VOCAB, bias=False)

    def forward(self, idx):
        mask = nn.Transformer.generate_square_subsequent_mask(
            BLOCK, dtype=torch.get_default_dtype()
        )
        x = self.wte(idx) + self.wpe(torch.arange(BLOCK))
        return self.head(self.ln(self.block(x, src_mask=mask)))

    def groups(self):
        decay = [p for p in self.parameters() if p.ndim > 1]
        rest = [p for p in self.parameters() if p.ndim < 2]
        return [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def build():
    torch.manual_seed(1)
    return GPT()


class Drawn(Sampler):
    """What RandomSampler(data, replacement=True, num_samples=int(1e10)) could begin with."""

    def __len__(self):
        return STEPS * BATCH

    def __iter__(self):
        return iter(
            torch.randint(40, (len(self),), generator=torch.Generator().manual_seed(4)).tolist()
        )


def sampler(data):
    return Drawn()


def original(model, device="cpu"):
    data = Sort()
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler(data))
    optimizer = optim.AdamW(model.groups(), lr=5e-3, betas=(0.9, 0.95))
    it = iter(loader)
    for _ in range(STEPS):
        x, y = next(it)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-1)
        model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {}


def ported(model, config):
    config.max_steps, config.global_batch_size, config.max_grad_norm = STEPS, BATCH, 1.0
    data = Sort()

    def loss_fn(model, batch):
        x, y = batch
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-1)
        return loss, (y != -1).sum()

    MultiGPUTrainingManager(config).fit(
        model,
        DataLoader(data, batch_size=BATCH, sampler=sampler(data)),
        loss_fn=loss_fn,
        optimizer=optim.AdamW(model.groups(), lr=5e-3, betas=(0.9, 0.95)),
    )
    return {}
