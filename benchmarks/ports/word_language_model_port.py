"""pytorch/examples word_language_model: an LSTM whose hidden state runs on from batch to batch,
plain SGD by hand, clipping, and a rate that falls where the validation does not improve."""

import torch
import torch.nn.functional as F
from torch import nn, optim

from multi_gpu_training import MultiGPUTrainingManager

BATCH, EVAL_BATCH, BPTT, EPOCHS, CLIP, RATE, WORDS = 5, 2, 4, 3, 0.25, 2.0, 12


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.rnn = nn.Embedding(WORDS, 6), nn.LSTM(6, 8, 2)
        self.decoder = nn.Linear(8, WORDS)

    def forward(self, words, hidden):
        output, hidden = self.rnn(self.encoder(words), hidden)
        return F.log_softmax(self.decoder(output), -1).flatten(0, 1), hidden


def build():
    torch.manual_seed(1)
    return LanguageModel()


def corpus(count, seed):
    words = torch.arange(count) * torch.arange(count) // 3 + seed
    return words % WORDS


def columns(words, count):
    return words[: len(words) // count * count].view(count, -1).t().contiguous()


def windows(source):
    for start in range(0, len(source) - 1, BPTT):
        length = min(BPTT, len(source) - 1 - start)
        words = source[start : start + length + 1]
        yield words[:-1], words[1:].flatten()


@torch.no_grad()
def evaluate(model, source):
    model.eval()
    total, hidden = 0.0, None
    for words, targets in windows(source):
        output, hidden = model(words, hidden)
        total += len(words) * F.nll_loss(output, targets).item()
    return total / (len(source) - 1)


def original(model, device="cpu"):
    train, val = columns(corpus(83, 0), BATCH).to(device), columns(corpus(40, 5), EVAL_BATCH)
    model, rate, best = model.to(device), RATE, None
    for epoch in range(EPOCHS):
        model.train()
        hidden = None
        for number, (words, targets) in enumerate(windows(train)):
            hidden = None if hidden is None else tuple(part.detach() for part in hidden)
            model.zero_grad()
            output, hidden = model(words, hidden)
            loss = F.nll_loss(output, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(parameter.grad, alpha=-rate)
            if number % 2 == 0:
                print(f"epoch {epoch} batch {number}: loss {loss.item():.4f}, rate {rate:g}")
        val_loss = evaluate(model, val.to(device))
        if best is None or val_loss < best:
            torch.save(model.state_dict(), "/dev/null")
            best = val_loss
        else:
            rate /= 4
    return {"loss": val_loss}


def ported(model, config):
    config.max_grad_norm = CLIP
    manager = MultiGPUTrainingManager(config)
    optimizer, best = optim.SGD(model.parameters(), lr=RATE), None
    trainer = manager.prepare(model, optimizer)
    train, val = columns(corpus(83, 0), BATCH), columns(corpus(40, 5), EVAL_BATCH)
    train = manager.shard(train.t()).t()  # this rank's columns, for the whole training
    for _ in range(manager.step // len(list(windows(train))), EPOCHS):
        model.train()
        hidden = None
        for words, targets in windows(train):
            hidden = None if hidden is None else tuple(part.detach() for part in hidden)
            with trainer.step():
                output, hidden = model(words, hidden)
                trainer.backward(F.nll_loss(output, targets), weight=targets.numel())
        val_loss = evaluate(model, val.to(manager.placement.device))
        manager.log(val_loss=val_loss)
        if best is None or val_loss < best:
            manager.save_checkpoint(best=True)
            best = val_loss
        else:
            optimizer.param_groups[0]["lr"] /= 4
    manager.finish()
    return {"loss": val_loss}
