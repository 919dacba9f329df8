"""nanoGPT: random windows of a token file, accumulation, clipping, warm-up and cosine by hand."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from multi_gpu_training import MultiGPUTrainingManager

BATCH, BLOCK, ACCUMULATION, STEPS, WARMUP, RATE, LEAST, WORDS = 3, 8, 4, 10, 3, 1e-2, 1e-3, 17


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attend, self.project = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        parts = self.attend(self.norms[0](x)).chunk(3, 2)
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, width), nn.Embedding(BLOCK, width)
        self.blocks = nn.Sequential(Block(width, 3), Block(width, 3))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, words, targets):
        x = self.tokens(words) + self.places(torch.arange(words.shape[1], device=words.device))
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build():
    torch.manual_seed(1)
    return GPT()


def optimizer_of(model):
    large = [p for p in model.parameters() if p.dim() >= 2]
    small = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": large, "weight_decay": 0.1}, {"params": small, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))


TEXT = torch.arange(400).square() // 5 % WORDS


def get_batch():
    starts = torch.randint(len(TEXT) - BLOCK, (BATCH,))
    return [torch.stack([TEXT[i + o : i + o + BLOCK] for i in starts]) for o in (0, 1)]


def rate_at(step):
    if step < WARMUP:
        return RATE * (step + 1) / (WARMUP + 1)
    done = (step - WARMUP) / (STEPS - WARMUP)
    return LEAST + 0.5 * (1 + math.cos(math.pi * done)) * (RATE - LEAST)


def original(model, device="cpu"):
    torch.manual_seed(1337)
    model = model.to(device)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step)
        total = 0.0
        for _ in range(ACCUMULATION):
            words, targets = (part.to(device) for part in get_batch())
            loss = model(words, targets) / ACCUMULATION
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 5 == 0:
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "/dev/null"
            )
            print(f"step {step}: loss {total:.4f}")
    return {"loss": total}


def ported(model, config):
    config.max_grad_norm, config.max_steps, config.checkpoint_frequency = 1.0, STEPS, 5
    torch.manual_seed(1337)
    manager = MultiGPUTrainingManager(config)
    optimizer = optimizer_of(model)
    trainer = manager.prepare(model, optimizer)
    while not manager.should_stop:
        for group in optimizer.param_groups:
            group["lr"] = rate_at(manager.step)
        with trainer.step():
            for micro in range(ACCUMULATION):
                words, targets = manager.shard(get_batch())
                last = micro == ACCUMULATION - 1
                loss = trainer.backward(model(words, targets), last=last)
    manager.finish()
    return {"loss": loss.item()}
