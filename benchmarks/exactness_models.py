"""Cases of exactness.py: models."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from exactness_trial import (
    BATCH,
    CLASSES,
    FEATURES,
    SAMPLES,
    Items,
    Outcome,
    Trial,
    adamw,
    case,
    classes,
    cross_entropy,
    integers,
    mlp,
    numbers,
    outcome,
    plain_loop,
    seeded,
    sgd,
    squares,
    values,
)
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from multi_gpu_training import Callback

GROUP = "Models"


@case(GROUP, "MLP, AdamW, shuffled, 1 sample in the last step", float32=True)
def plain_mlp(t: Trial) -> Outcome:
    data = classes(t.dtype, 25)
    return t.train(mlp(t.dtype), data, nn.CrossEntropyLoss(), adamw, shuffle=True, epochs=3)


def images(dtype: torch.dtype, size: int = 8, samples: int = SAMPLES) -> TensorDataset:
    return TensorDataset(numbers(samples, 3, size, size, dtype=dtype), integers(CLASSES, samples))


class ConvNet(nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), norm(6), nn.ReLU(),
            nn.Conv2d(6, 8, 3, stride=2), norm(8), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


@case(GROUP, "CNN with BatchNorm, sync_bn", float32=True)
def cnn(t: Trial) -> Outcome:
    model = seeded(lambda: ConvNet(nn.BatchNorm2d), t.dtype)
    return t.train(model, images(t.dtype), nn.CrossEntropyLoss(), sgd, sync_bn=True)


@case(GROUP, "CNN with BatchNorm without running statistics, momentum None, sync_bn")
def cnn_odd_batchnorm(t: Trial) -> Outcome:
    def build() -> nn.Module:
        model = ConvNet(lambda n: nn.BatchNorm2d(n, momentum=None))
        model.body[4] = nn.BatchNorm2d(8, track_running_stats=False, affine=False)
        return model

    return t.train(
        seeded(build, t.dtype), images(t.dtype), nn.CrossEntropyLoss(), sgd, sync_bn=True
    )


@case(GROUP, "CNN with BatchNorm, sync_bn, accumulation over 2 micro-batches")
def cnn_accumulated(t: Trial) -> Outcome:
    model = seeded(lambda: ConvNet(nn.BatchNorm2d), t.dtype)
    data = images(t.dtype, samples=24)
    return t.train(model, data, nn.CrossEntropyLoss(), sgd, sync_bn=True, accumulate=2)


class ScaledBatchNorm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2.0 + 0.5


@case(GROUP, "BatchNorm subclass with its own forward, sync_bn", point=7)
def batchnorm_subclass(t: Trial) -> Outcome:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, 12), ScaledBatchNorm(12), nn.Tanh(), nn.Linear(12, CLASSES)
        )

    return t.train(
        seeded(build, t.dtype), classes(t.dtype), nn.CrossEntropyLoss(), sgd, sync_bn=True
    )


class SharedNorm(nn.Module):
    """One BatchNorm under four names, as twin branches have it."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(8)
        self.first = nn.Sequential(nn.Linear(FEATURES, 8), norm)
        self.second = nn.Sequential(nn.Linear(FEATURES, 8), norm)
        self.norm = self.alias = norm
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.alias(torch.tanh(self.first(x)) + torch.tanh(self.second(x))))


@case(GROUP, "one BatchNorm under four names, sync_bn", point=7)
def batchnorm_shared(t: Trial) -> Outcome:
    model = seeded(SharedNorm, t.dtype)
    return t.train(model, classes(t.dtype), nn.CrossEntropyLoss(), sgd, sync_bn=True)


@case(GROUP, "BatchNorm kept in eval mode in an own loop")
def frozen_batchnorm(t: Trial) -> Outcome:
    model = seeded(lambda: ConvNet(nn.BatchNorm2d), t.dtype)
    data = images(t.dtype)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_var.mul_(1.5)
            module.eval()
    if t.by_hand:
        return plain(t, model, data, cross_entropy, sgd)
    manager = t.manager(global_batch_size=BATCH)
    _, loader, _ = manager.setup_training(model, data, loss_fn=cross_entropy, optimizer=sgd)
    for _ in range(2):
        for batch in loader:
            manager.trainer.train_step(batch)
    manager.finish()
    return outcome(model)


def plain(t: Trial, model: nn.Module, data: Any, loss: Any, optimizer: Any, **how: Any) -> Outcome:
    """Batches in order by hand, without the losses of the epochs."""
    from torch.utils.data import DataLoader

    made = optimizer(model.parameters())
    loader = DataLoader(data, batch_size=BATCH)
    return Outcome(plain_loop(model, lambda _: loader, loss, made, **how).tensors)


class ViT(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.place = nn.Parameter(torch.randn(1, 5, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, 3, 24, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls.expand(len(x), -1, -1), tokens], 1) + self.place
        return self.head(self.blocks(tokens)[:, 0])


# A bias of the keys shifts all scores of a query alike, which softmax takes away.
@case(GROUP, "ViT, AdamW, cosine", float32=True, left_out=("in_proj_bias",))
def vit(t: Trial) -> Outcome:
    def cosine(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)

    model = seeded(ViT, t.dtype)
    return t.train(
        model, images(t.dtype), nn.CrossEntropyLoss(), adamw, epochs=3, scheduler=cosine, clip=0.5
    )


class Recurrent(nn.Module):
    """Last hidden state of packed sequences; padding does not matter."""

    def __init__(self, kind: Any, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.rnn = kind(4, 7, batch_first=batch_first, bidirectional=True)
        self.head = nn.Linear(14, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            x, lengths, batch_first=self.batch_first, enforce_sorted=False
        )
        hidden = self.rnn(packed)[1]
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return self.head(torch.cat([hidden[0], hidden[1]], 1))


def sequences(dtype: torch.dtype) -> Items:
    everything = numbers(SAMPLES, 9, 4, dtype=dtype)
    return Items(SAMPLES, lambda i: (everything[i, : 2 + i * 5 % 8], i % CLASSES))


def padded(batch_first: bool) -> Any:
    def collate(samples: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
        lengths = torch.tensor([len(x) for x, _ in samples])
        inputs = pad_sequence([x for x, _ in samples], batch_first=batch_first)
        return inputs, lengths, torch.tensor([y for _, y in samples])

    return collate


def sequence_loss(model: nn.Module, batch: Any) -> Tensor:
    x, lengths, y = batch
    return F.cross_entropy(model(x, lengths), y)


def recurrent(t: Trial, kind: Any, batch_first: bool, loss: Any, **how: Any) -> Outcome:
    """By hand and ours; samples are counted by their targets, whatever the layout."""
    from torch.utils.data import DataLoader

    model = seeded(lambda: Recurrent(kind, batch_first), t.dtype)
    data, collate = sequences(t.dtype), padded(batch_first)
    loader = DataLoader(data, batch_size=BATCH, collate_fn=collate)
    if t.by_hand:
        made = sgd(model.parameters())

        def counted(model: nn.Module, batch: Any) -> Any:
            return sequence_loss(model, batch), len(batch[-1])

        return plain_loop(model, lambda _: loader, counted, made)
    manager = t.manager(global_batch_size=BATCH, **how)
    result = manager.fit(model, loader, loss_fn=loss, optimizer=sgd)
    return outcome(model, **{f"loss {e}": r["train"]["loss"] for e, r in enumerate(result.history)})


@case(GROUP, "GRU, batch_first, packed")
def gru(t: Trial) -> Outcome:
    return recurrent(t, nn.GRU, True, sequence_loss)


@case(GROUP, "LSTM, time-major collate, own loss", point=13)
def lstm_time_major(t: Trial) -> Outcome:
    return recurrent(t, nn.LSTM, False, sequence_loss)


@case(GROUP, "GRU, time-major collate, criterion")
def gru_criterion(t: Trial) -> Outcome:
    return recurrent(t, nn.GRU, False, nn.CrossEntropyLoss())


# Transformers. Causal models of Hugging Face compute their loss in float32, whatever they are.

WORDS = 40


def gpt2(dtype: torch.dtype) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=12, n_layer=2, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return seeded(lambda: GPT2LMHeadModel(config), dtype)


def sentences(samples: int = SAMPLES, longest: int = 12) -> Items:
    tokens = integers(WORDS, samples, longest)

    def item(i: int) -> dict[str, Tensor]:
        length = 2 + i * 5 % (longest - 1)
        mask = (torch.arange(longest) < length).long()
        return {
            "input_ids": tokens[i] * mask,
            "attention_mask": mask,
            "labels": tokens[i].where(mask.bool(), torch.tensor(-100)),
        }

    return Items(samples, item)


def causal_weight(batch: Any) -> Tensor:
    return (batch["labels"][:, 1:] != -100).sum()


def own_causal_loss(model: nn.Module, batch: Any) -> Any:
    return model(**batch).loss, causal_weight(batch)


def token_loss(model: nn.Module, batch: Any) -> Any:
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:]), causal_weight(batch)


@case(GROUP, "GPT-2 with padding, own loss over tokens", float32=True)
def gpt2_tokens(t: Trial) -> Outcome:
    return t.train(gpt2(t.dtype), sentences(), token_loss, sgd, accumulate=2, shuffle=True)


@case(GROUP, "GPT-2 with padding, a loss function with the model's own loss", only="float32")
def gpt2_own(t: Trial) -> Outcome:
    return t.train(gpt2(t.dtype), sentences(), own_causal_loss, sgd)


def _default(
    t: Trial, model: nn.Module, data: Any, loss: Any, optimizer: Any, **how: Any
) -> Outcome:
    """By hand with `loss`; ours without a loss function."""
    if t.by_hand:
        return t.train(model, data, loss, optimizer, **how)
    return t.train(model, data, None, optimizer, **how)


@case(GROUP, "GPT-2 with padding, no loss function given", only="float32")
def gpt2_default(t: Trial) -> Outcome:
    return _default(t, gpt2(t.dtype), sentences(), own_causal_loss, sgd, accumulate=2)


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **batch: Tensor) -> Any:
        return self.inner(**batch)


@case(GROUP, "GPT-2 inside another module, no loss function given", point=12, only="float32")
def gpt2_wrapped(t: Trial) -> Outcome:
    return _default(t, Wrapped(gpt2(t.dtype)), sentences(), own_causal_loss, sgd)


class TinyForCausalLM(nn.Module):
    """Called like a model of Hugging Face, and quick to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.head = nn.Linear(8, WORDS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        from transformers.modeling_outputs import CausalLMOutput

        logits = self.head(torch.tanh(self.embed(input_ids).cumsum(1)))
        loss = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:])
        return CausalLMOutput(loss=loss, logits=logits)


@case(GROUP, "causal model compiled by the user, no loss function given", point=12)
def causal_compiled(t: Trial) -> Outcome:
    model = torch.compile(seeded(TinyForCausalLM, t.dtype), backend="eager")
    return _default(t, model, sentences(), own_causal_loss, sgd)


@case(GROUP, "causal model of the user's own class, no loss function given")
def causal_own(t: Trial) -> Outcome:
    return _default(t, seeded(TinyForCausalLM, t.dtype), sentences(), own_causal_loss, sgd)


@case(GROUP, "MLP compiled by the user")
def compiled(t: Trial) -> Outcome:
    model = torch.compile(mlp(t.dtype), backend="eager")
    return t.train(model, classes(t.dtype), nn.CrossEntropyLoss(), adamw)


@case(GROUP, "MLP compiled in place by the user, shuffled")
def compiled_in_place(t: Trial) -> Outcome:
    model = mlp(t.dtype)
    model.compile(backend="eager")
    return t.train(model, classes(t.dtype), nn.CrossEntropyLoss(), adamw, shuffle=True)


@case(GROUP, "Llama with padding, AdamW, no loss function given", only="float32")
def llama(t: Trial) -> Outcome:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=12, intermediate_size=20, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
    )  # fmt: skip
    model = seeded(lambda: LlamaForCausalLM(config), t.dtype)
    return _default(t, model, sentences(), own_causal_loss, adamw, clip=1.0)


def bert_config() -> Any:
    from transformers import BertConfig

    return BertConfig(
        vocab_size=WORDS, hidden_size=12, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=20, max_position_embeddings=16, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, num_labels=CLASSES,
    )  # fmt: skip


@case(GROUP, "BERT classification, no loss function given", left_out=("key.bias",))
def bert(t: Trial) -> Outcome:
    from transformers import BertForSequenceClassification

    model = seeded(lambda: BertForSequenceClassification(bert_config()), t.dtype)
    inner = sentences()
    data = Items(SAMPLES, lambda i: {**inner[i], "labels": i % CLASSES})
    return _default(t, model, data, lambda m, b: m(**b).loss, adamw)


@case(GROUP, "BERT masked words, few labels per sentence", left_out=("key.bias",))
def bert_masked(t: Trial) -> Outcome:
    from transformers import BertForMaskedLM

    model = seeded(lambda: BertForMaskedLM(bert_config()), t.dtype)
    inner = sentences()

    def item(i: int) -> dict[str, Tensor]:
        sample = dict(inner[i])
        keep = torch.arange(12) < i % 3  # of some sentences none at all
        sample["labels"] = sample["labels"].where(keep, torch.tensor(-100))
        return sample

    def loss(model: nn.Module, batch: Any) -> Any:
        return model(**batch).loss, (batch["labels"] != -100).sum()

    return _default(t, model, Items(SAMPLES, item), loss, sgd)


@case(GROUP, "T5, padded labels, no loss function given", only="float32")
def t5(t: Trial) -> Outcome:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=WORDS, d_model=12, d_kv=6, d_ff=20, num_layers=1, num_heads=2,
        dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    model = seeded(lambda: T5ForConditionalGeneration(config), t.dtype)
    inner = sentences()

    def loss(model: nn.Module, batch: Any) -> Any:
        return model(**batch).loss, (batch["labels"] != -100).sum()

    return _default(t, model, inner, loss, sgd)


# Dense prediction and generation


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.middle = nn.Conv2d(6, 8, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.out = nn.Conv2d(12, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = torch.relu(self.norm(self.down(x)))
        low = torch.relu(self.middle(high))
        return self.out(torch.cat([high, self.up(low)], 1))


@case(GROUP, "UNet, pixels with ignore_index, criterion", float32=True)
def unet(t: Trial) -> Outcome:
    labels = integers(CLASSES, SAMPLES, 8, 8)
    labels[integers(3, SAMPLES, 8, 8, seed=3) == 0] = 255
    labels[5:7] = 255
    data = TensorDataset(numbers(SAMPLES, 3, 8, 8, dtype=t.dtype), labels)

    def by_hand(model: nn.Module, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(model(x), y, ignore_index=255), (y != 255).sum()

    loss = by_hand if t.by_hand else nn.CrossEntropyLoss(ignore_index=255)
    return t.train(seeded(UNet, t.dtype), data, loss, sgd)


@case(GROUP, "autoencoder: batches without a target")
def autoencoder(t: Trial) -> Outcome:
    data = TensorDataset(numbers(SAMPLES, FEATURES, dtype=t.dtype))
    model = mlp(t.dtype, out=FEATURES)
    return t.train(model, data, lambda m, b: F.mse_loss(m(b[0]), b[0]), adamw)


@case(GROUP, "autoencoder: a dataset of bare tensors")
def bare_tensors(t: Trial) -> Outcome:
    everything = numbers(SAMPLES, FEATURES, dtype=t.dtype)
    data = Items(SAMPLES, lambda i: everything[i])
    return t.train(mlp(t.dtype, out=FEATURES), data, lambda m, b: F.mse_loss(m(b), b), adamw)


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(FEATURES, 6)
        self.decode = nn.Linear(3, FEATURES)

    def forward(self, x: Tensor, noise: Tensor) -> dict[str, Tensor]:
        mean, spread = self.encode(x).chunk(2, 1)
        z = mean + noise * (spread / 2).exp()
        divergence = -0.5 * (1 + spread - mean**2 - spread.exp()).sum(1).mean()
        return {"recon": self.decode(z), "kl": divergence}


def elbo(model: nn.Module, batch: Any) -> Tensor:
    x, noise = batch
    found = model(x, noise)
    return F.mse_loss(found["recon"], x) + 0.1 * found["kl"]


@case(GROUP, "VAE, noise from the dataset's generator, dict output")
def vae(t: Trial) -> Outcome:
    everything = numbers(SAMPLES, FEATURES, dtype=t.dtype)

    def item(i: int) -> tuple[Tensor, Tensor]:
        return everything[i], numbers(3, seed=i, dtype=t.dtype)

    return t.train(seeded(VAE, t.dtype), Items(SAMPLES, item), elbo, adamw)


@case(GROUP, "VAE, noise drawn by augment", against_one=True)
def vae_augment(t: Trial) -> Outcome:
    data = TensorDataset(numbers(SAMPLES, FEATURES, dtype=t.dtype))

    def augment(batch: Any, random: Any) -> Any:
        return batch[0], random.normal(3).to(t.dtype)

    return t.train(seeded(VAE, t.dtype), data, elbo, adamw, fit={"augment": augment})


# Unusual parameters


class Experts(nn.Module):
    """Each sample goes to one of many experts; most steps leave some without work."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(8))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        out = x.new_zeros(len(x), CLASSES)
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            if mine.any():
                out = out.index_put((mine.nonzero()[:, 0],), expert(x[mine]))
        return out


def routed(t: Trial, samples: int, **how: Any) -> Outcome:
    chosen = torch.arange(samples) % 5 + (torch.arange(samples) // 16) * 3
    x, y = classes(t.dtype, samples).tensors
    data = TensorDataset(x, chosen % 8, y)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, chosen, y = batch
        return F.cross_entropy(model(x, chosen), y)

    model = seeded(Experts, t.dtype)
    return t.train(model, data, loss, adamw, find_unused_parameters=True, **how)


@case(GROUP, "experts without work, find_unused_parameters, AdamW", point=11)
def experts(t: Trial) -> Outcome:
    return routed(t, SAMPLES)


@case(GROUP, "experts without work, 1 sample in the last step", point=11)
def experts_few(t: Trial) -> Outcome:
    return routed(t, 25)


@case(GROUP, "experts without work, accumulation", point=11)
def experts_accumulated(t: Trial) -> Outcome:
    return routed(t, 25, accumulate=2)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(30, 5, mode="mean", sparse=True)

    def forward(self, words: Tensor) -> Tensor:
        return self.embed(words)


def sparse_data(dtype: torch.dtype) -> TensorDataset:
    return TensorDataset(integers(30, SAMPLES, 4), numbers(SAMPLES, 5, dtype=dtype))


@case(GROUP, "EmbeddingBag(sparse=True), SparseAdam")
def sparse_adam(t: Trial) -> Outcome:
    return t.train(
        seeded(Sparse, t.dtype),
        sparse_data(t.dtype),
        nn.MSELoss(),
        lambda p: torch.optim.SparseAdam(p, lr=0.05),
    )


class SparseAndDense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 6, sparse=True)
        self.head = nn.Linear(6, 5)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(words).mean(1)))


@case(GROUP, "sparse embedding and dense head, SGD, accumulation")
def sparse_sgd(t: Trial) -> Outcome:
    model = seeded(SparseAndDense, t.dtype)
    return t.train(
        model,
        sparse_data(t.dtype),
        nn.MSELoss(),
        lambda p: torch.optim.SGD(p, lr=0.5),
        accumulate=2,
    )


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.mix = nn.Linear(8, 8)
        self.out = nn.Linear(8, WORDS, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mix(self.mix(self.embed(tokens)))))


@case(GROUP, "tied weights, one layer called twice, shuffled", float32=True)
def tied(t: Trial) -> Outcome:
    tokens = integers(WORDS, SAMPLES, 6)
    data = TensorDataset(tokens, tokens.roll(-1, 1))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    return t.train(seeded(Tied, t.dtype), data, loss, adamw, shuffle=True)


@case(GROUP, "weight_norm")
def weight_normed(t: Trial) -> Outcome:
    def build() -> nn.Module:
        return nn.Sequential(
            weight_norm(nn.Linear(FEATURES, 10)), nn.Tanh(), weight_norm(nn.Linear(10, CLASSES))
        )

    return t.train(seeded(build, t.dtype), classes(t.dtype), nn.CrossEntropyLoss(), adamw)


def spectral() -> nn.Module:
    return nn.Sequential(
        spectral_norm(nn.Linear(FEATURES, 10)), nn.Tanh(), spectral_norm(nn.Linear(10, CLASSES))
    )


@case(GROUP, "spectral_norm, 1 sample in the last step")
def spectral_normed(t: Trial) -> Outcome:
    return t.train(seeded(spectral, t.dtype), classes(t.dtype, 25), nn.CrossEntropyLoss(), sgd)


@case(GROUP, "spectral_norm, no sample for rank 0 in the last step", point=17)
def spectral_absent(t: Trial) -> Outcome:
    weights = {1: None, 2: [1, 3], 3: [1, 3, 2], 4: [1, 3, 2, 2]}[t.world]
    return t.train(
        seeded(spectral, t.dtype), classes(t.dtype, 25), nn.CrossEntropyLoss(), sgd,
        **({} if t.by_hand else {"share_weights": weights}),
    )  # fmt: skip


@case(GROUP, "spectral_norm under activation checkpointing", point=17)
def spectral_recomputed(t: Trial) -> Outcome:
    return t.train(
        seeded(spectral, t.dtype), classes(t.dtype), nn.CrossEntropyLoss(), sgd,
        **({} if t.by_hand else {"use_gradient_checkpointing": True}),
    )  # fmt: skip


@case(GROUP, "LayerNorm, GroupNorm and InstanceNorm")
def norms(t: Trial) -> Outcome:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.InstanceNorm2d(6, affine=True), nn.ReLU(),
            nn.Conv2d(6, 6, 3), nn.GroupNorm(3, 6), nn.ReLU(), nn.Flatten(),
            nn.LayerNorm(96), nn.Linear(96, CLASSES),
        )  # fmt: skip

    return t.train(seeded(build, t.dtype), images(t.dtype), nn.CrossEntropyLoss(), sgd)


@case(
    GROUP,
    "InstanceNorm with running statistics (which follow rank 0)",
    left_out=("running_",),
)
def instance_statistics(t: Trial) -> Outcome:
    model = seeded(
        lambda: ConvNet(lambda n: nn.InstanceNorm2d(n, track_running_stats=True)), t.dtype
    )
    return t.train(model, images(t.dtype), nn.CrossEntropyLoss(), sgd)


class ComplexNet(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        kind = torch.complex128 if dtype is torch.float64 else torch.complex64
        self.phase = nn.Linear(FEATURES, 8, dtype=kind)
        self.head = nn.Linear(8, CLASSES, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.phase(x.to(self.phase.weight.dtype)).abs())


def complex_net(t: Trial) -> nn.Module:
    torch.manual_seed(1)
    return ComplexNet(t.dtype)


@case(GROUP, "complex parameters, SGD")
def complex_sgd(t: Trial) -> Outcome:
    return t.train(complex_net(t), classes(t.dtype), nn.CrossEntropyLoss(), sgd)


@case(GROUP, "complex parameters, AdamW, clipping")
def complex_adam(t: Trial) -> Outcome:
    return t.train(complex_net(t), classes(t.dtype), nn.CrossEntropyLoss(), adamw, clip=0.3)


@case(GROUP, "Fourier layer: rfft, complex weights beside real ones")
def fourier(t: Trial) -> Outcome:
    class Fourier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Parameter(
                torch.randn(9, dtype=torch.complex128 if t.dtype is torch.float64 else torch.cfloat)
            )
            self.head = nn.Linear(16, 1, dtype=t.dtype)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.mix, n=16))

    torch.manual_seed(1)
    data = TensorDataset(numbers(SAMPLES, 16, dtype=t.dtype), numbers(SAMPLES, 1, dtype=t.dtype))
    return t.train(Fourier(), data, nn.MSELoss(), adamw)


@case(GROUP, "lazy modules after a first forward by the user")
def lazy(t: Trial) -> Outcome:
    def build() -> nn.Module:
        model = nn.Sequential(nn.LazyLinear(12), nn.Tanh(), nn.LazyLinear(CLASSES))
        model(torch.zeros(1, FEATURES))
        return model

    return t.train(seeded(build, t.dtype), classes(t.dtype), nn.CrossEntropyLoss(), adamw)


@case(GROUP, "lazy modules that nobody has called", refusal=True)
def lazy_uncalled(t: Trial) -> Outcome:
    torch.manual_seed(1)
    model = nn.Sequential(nn.LazyLinear(12), nn.Tanh(), nn.LazyLinear(CLASSES))
    if t.by_hand:
        return Outcome({})
    return t.train(model, classes(torch.float32), nn.CrossEntropyLoss(), adamw)


class Thaw(Callback):
    def on_epoch_begin(self, run: Any, epoch: int) -> None:
        if epoch == 1:
            run.model[0].requires_grad_(True)


@case(GROUP, "a layer frozen at first, unfrozen by a callback after an epoch, clipping", point=3)
def unfrozen(t: Trial) -> Outcome:
    model = mlp(t.dtype)
    model[0].requires_grad_(False)
    data = classes(t.dtype)

    def optimizer(parameters: Any) -> Any:
        return adamw(model.parameters())  # of the frozen ones too, as with Lightning

    if t.by_hand:
        return t_plain_thaw(t, model, data, optimizer)
    manager = t.manager(global_batch_size=BATCH, max_grad_norm=0.2)
    manager.fit(model, data, loss_fn=nn.CrossEntropyLoss(), optimizer=optimizer, callbacks=[Thaw()])
    return outcome(model)


def t_plain_thaw(t: Trial, model: nn.Module, data: Any, optimizer: Any) -> Outcome:
    def thaw(epoch: int) -> None:
        model[0].requires_grad_(True)

    return plain(t, model, data, cross_entropy, optimizer, clip=0.2, after_epoch=thaw)


class Counting(nn.Module):
    """Buffers that the model itself updates: a number of calls, and a mean of its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(torch.float64)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("trace", torch.zeros(12, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.trace.lerp_(self.net[0].weight.detach(), 0.1)
        return self.net(x + 0.01 * self.trace.sum() / (1 + self.calls))


@case(GROUP, "buffers that the model updates from its weights, 1 sample in the last step")
def own_buffers(t: Trial) -> Outcome:
    model = seeded(Counting, t.dtype)
    return t.train(model, classes(t.dtype, 25), nn.CrossEntropyLoss(), sgd)


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh())

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.encoder(a), self.encoder(b)


@case(GROUP, "siamese net: BatchNorm called twice a step, cosine embedding loss, sync_bn")
def siamese(t: Trial) -> Outcome:
    a, b = (
        numbers(SAMPLES, FEATURES, dtype=t.dtype),
        numbers(SAMPLES, FEATURES, seed=4, dtype=t.dtype),
    )
    data = TensorDataset(a, b, integers(2, SAMPLES) * 2 - 1)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        a, b, same = batch
        return F.cosine_embedding_loss(*model(a, b), same, margin=0.2)

    return t.train(seeded(Siamese, t.dtype), data, loss, sgd, sync_bn=True)


@case(GROUP, "two inputs, criterion called on both")
def two_inputs(t: Trial) -> Outcome:
    data = TensorDataset(
        numbers(SAMPLES, FEATURES, dtype=t.dtype),
        numbers(SAMPLES, 4, seed=5, dtype=t.dtype),
        numbers(SAMPLES, 2, seed=6, dtype=t.dtype),
    )

    class Bilinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Bilinear(FEATURES, 4, 2)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.mix(a, b)

    return t.train(seeded(Bilinear, t.dtype), data, nn.SmoothL1Loss(), adamw)


@case(GROUP, "parameters of two precisions")
def two_precisions(t: Trial) -> Outcome:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(FEATURES, 8, dtype=torch.float64)
            self.second = nn.Linear(8, 1, dtype=torch.float64)
            self.scale = nn.Parameter(torch.ones(1, dtype=torch.float32))

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x))) * self.scale.double()

    torch.manual_seed(1)
    # A weight that float32 cannot hold exactly would show where it is rounded on the way.
    x, y = values(torch.float64).tensors
    data = TensorDataset(x, numbers(SAMPLES, seed=3).abs() + 0.1, y)

    def loss(model: nn.Module, batch: Any) -> Any:
        x, w, y = batch
        return (w * (model(x) - y)[:, 0] ** 2).sum() / w.sum(), w.sum()

    # float32 rounds its own gradient; the rest must not feel more than that.
    def optimizer(_: Any) -> Any:
        return torch.optim.SGD([p for p in model.parameters() if p.dtype is torch.float64], lr=0.1)

    model = Mixed()
    model.scale.requires_grad_(False)
    return t.train(model, data, loss, optimizer)


@case(GROUP, "half of the parameters frozen, the others in two groups")
def frozen_half(t: Trial) -> Outcome:
    model = mlp(t.dtype)
    model[0].weight.requires_grad_(False)

    def optimizer(_: Any) -> Any:
        return torch.optim.AdamW(
            [{"params": [model[0].bias], "lr": 0.05}, {"params": model[2].parameters()}],
            lr=1e-2,
            weight_decay=0.1,
        )

    return t.train(model, classes(t.dtype), nn.CrossEntropyLoss(), optimizer)


@case(GROUP, "gradient hook on a parameter that scales its gradient")
def gradient_hook(t: Trial) -> Outcome:
    model = mlp(t.dtype)
    model[0].weight.register_hook(lambda grad: grad * 0.25)
    return t.train(model, classes(t.dtype), nn.CrossEntropyLoss(), sgd)


@case(GROUP, "model built by a function")
def built_by_function(t: Trial) -> Outcome:
    kept: list[nn.Module] = []

    def build() -> nn.Module:
        kept.append(mlp(t.dtype))
        return kept[0]

    if t.by_hand:
        return t.train(mlp(t.dtype), classes(t.dtype), nn.CrossEntropyLoss(), adamw)
    manager = t.manager(global_batch_size=BATCH)
    result = manager.fit(build, classes(t.dtype), loss_fn=nn.CrossEntropyLoss(), optimizer=adamw)
    return outcome(
        kept[0], **{f"loss {e}": r["train"]["loss"] for e, r in enumerate(result.history)}
    )


@case(GROUP, "diffusion: time step and noise per sample, positional features", float32=True)
def diffusion(t: Trial) -> Outcome:
    class Denoiser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(FEATURES + 4, 16), nn.SiLU(), nn.Linear(16, FEATURES)
            )
            self.register_buffer("rates", torch.linspace(0.99, 0.1, 10).double())

        def forward(self, x: Tensor, time: Tensor) -> Tensor:
            angle = time[:, None] * torch.tensor([1.0, 0.1], dtype=x.dtype) * math.pi
            return self.net(torch.cat([x, angle.sin(), angle.cos()], 1))

    everything = numbers(SAMPLES, FEATURES, dtype=t.dtype)

    def item(i: int) -> tuple[Tensor, Tensor, int]:
        return everything[i], numbers(FEATURES, seed=i, dtype=t.dtype), i * 7 % 10

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, noise, time = batch
        keep = model.rates[time][:, None]
        return F.mse_loss(model(keep.sqrt() * x + (1 - keep).sqrt() * noise, time), noise)

    return t.train(seeded(Denoiser, t.dtype), Items(SAMPLES, item), loss, adamw, clip=1.0)


@case(GROUP, "graph network: dense neighbours per sample, edges of its own")
def graphs(t: Trial) -> Outcome:
    class GraphNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.message = nn.Linear(4, 8)
            self.update = nn.GRUCell(8, 4)
            self.out = nn.Linear(4, 1)

        def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
            for _ in range(2):
                sent = edges @ self.message(nodes)
                nodes = self.update(sent.flatten(0, 1), nodes.flatten(0, 1)).view_as(nodes)
            return self.out(nodes.mean(1))

    data = TensorDataset(
        numbers(SAMPLES, 5, 4, dtype=t.dtype),
        (numbers(SAMPLES, 5, 5, seed=2) > 0).to(t.dtype),
        numbers(SAMPLES, 1, seed=3, dtype=t.dtype),
    )
    return t.train(seeded(GraphNet, t.dtype), data, nn.HuberLoss(), adamw)


@case(GROUP, "3 samples for a batch of 8")
def three_samples(t: Trial) -> Outcome:
    return t.train(mlp(t.dtype, out=1), values(t.dtype, 3), squares, adamw, epochs=5)


class Warming(nn.Module):
    """Counts its calls in a Python number, as temperatures are often annealed."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(torch.float64)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.net(x) / (1 + 0.1 * self.calls)


@case(GROUP, "a Python number that the model counts up, 1 sample in the last step")
def counted_calls(t: Trial) -> Outcome:
    model = seeded(Warming, t.dtype)
    return t.train(model, classes(t.dtype, 25), nn.CrossEntropyLoss(), sgd)


def normalised() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES)
    )


@case(GROUP, "penalty on activations from a forward hook on BatchNorm, sync_bn")
def hooked(t: Trial) -> Outcome:
    model, seen = seeded(normalised, t.dtype), []
    model[1].register_forward_hook(lambda module, args, out: seen.append(out))

    def loss(m: nn.Module, batch: Any) -> Tensor:
        seen.clear()
        mean = cross_entropy(m, batch)
        return mean + 0.1 * seen[0].abs().mean()

    return t.train(model, classes(t.dtype), loss, sgd, sync_bn=True)


@case(GROUP, "optimizer of BatchNorm's parameters made before sync_bn")
def prebuilt_batchnorm(t: Trial) -> Outcome:
    model = seeded(normalised, t.dtype)
    made = torch.optim.AdamW(
        [{"params": model[1].parameters(), "lr": 0.05}, {"params": model[3].parameters()}], lr=1e-2
    )
    return t.train(model, classes(t.dtype), nn.CrossEntropyLoss(), lambda _: made, sync_bn=True)


@case(GROUP, "nn.SyncBatchNorm put in by the user, sync_bn")
def user_sync(t: Trial) -> Outcome:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(seeded(normalised, t.dtype))
    return t.train(model, classes(t.dtype), nn.CrossEntropyLoss(), sgd, sync_bn=True)


class Auxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 8)
        self.head, self.extra = nn.Linear(8, CLASSES), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, more: bool) -> Tensor:
        hidden = torch.tanh(self.body(x))
        return self.head(hidden) + (self.extra(hidden) if more else 0)


@case(GROUP, "a head that is used in every other step, find_unused_parameters, AdamW", point=11)
def auxiliary(t: Trial) -> Outcome:
    x, y = classes(t.dtype, 25).tensors
    data = TensorDataset(x, torch.arange(25) // BATCH % 2, y)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, more, y = batch
        return F.cross_entropy(model(x, bool(more[0])), y)

    model = seeded(Auxiliary, t.dtype)
    return t.train(model, data, loss, adamw, find_unused_parameters=True, epochs=3)


@case(GROUP, "distillation: a frozen teacher with BatchNorm in the loss")
def distillation(t: Trial) -> Outcome:
    teacher = seeded(normalised, t.dtype, 5).eval().requires_grad_(False)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        soft = teacher(x).softmax(1)
        kl = F.kl_div(model(x).log_softmax(1), soft, reduction="batchmean")
        return 0.5 * F.cross_entropy(model(x), y) + 0.5 * kl

    return t.train(mlp(t.dtype), classes(t.dtype, 25), loss, adamw)


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(FEATURES, 8), normalised_block()
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.block, self.first(x), use_reentrant=False)
        return self.head(hidden)


def normalised_block() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8))


@case(GROUP, "torch.utils.checkpoint by the user around BatchNorm, sync_bn")
def user_checkpoint(t: Trial) -> Outcome:
    model = seeded(Recomputed, t.dtype)
    return t.train(model, classes(t.dtype), nn.CrossEntropyLoss(), sgd, sync_bn=True)


@case(GROUP, "activation checkpointing of the config with BatchNorm, sync_bn")
def config_checkpoint(t: Trial) -> Outcome:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, 8), normalised_block(), normalised_block(), nn.Linear(8, CLASSES)
        )

    more = {} if t.by_hand else {"use_gradient_checkpointing": True}
    return t.train(
        seeded(build, t.dtype), classes(t.dtype), nn.CrossEntropyLoss(), sgd, sync_bn=True, **more
    )


@case(GROUP, "pruned weights (masks as buffers, hooks before forward)")
def pruned(t: Trial) -> Outcome:
    from torch.nn.utils import prune

    model = mlp(t.dtype)
    prune.l1_unstructured(model[0], "weight", 0.4)
    return t.train(model, classes(t.dtype, 25), nn.CrossEntropyLoss(), adamw)


@case(GROUP, "MAML: each sample is a task, an inner step through functional_call")
def maml(t: Trial) -> Outcome:
    from torch.func import functional_call

    def loss(model: nn.Module, batch: Any) -> Tensor:
        total = torch.zeros((), dtype=t.dtype)
        for shot, query in zip(*batch, strict=True):
            named = dict(model.named_parameters())
            inner = F.mse_loss(model(shot[:, :-1]), shot[:, -1:])
            slopes = torch.autograd.grad(inner, list(named.values()), create_graph=True)
            moved = {n: p - 0.1 * g for (n, p), g in zip(named.items(), slopes, strict=True)}
            found = functional_call(model, moved, (query[:, :-1],))
            total = total + F.mse_loss(found, query[:, -1:])
        return total / len(batch[0])

    data = TensorDataset(
        numbers(25, 4, FEATURES + 1, dtype=t.dtype),
        numbers(25, 4, FEATURES + 1, seed=2, dtype=t.dtype),
    )
    return t.train(mlp(t.dtype, out=1), data, loss, adamw)


class MomentumTeacher(nn.Module):
    """BYOL: a slow copy of the encoder, both with BatchNorm in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8))
        self.predict = nn.Linear(8, 8)
        self.slow = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.slow(b)
        return F.mse_loss(self.predict(self.online(a)), wanted)


class Follow(Callback):
    def on_step_end(self, run: Any, result: Any) -> None:
        follow(run.model)


@torch.no_grad()
def follow(model: Any) -> None:
    for slow, fast in zip(model.slow.parameters(), model.online.parameters(), strict=True):
        slow.lerp_(fast, 0.1)


@case(GROUP, "momentum teacher (BYOL) with BatchNorm, moved by a callback, sync_bn")
def byol(t: Trial) -> Outcome:
    model = seeded(MomentumTeacher, t.dtype)
    data = TensorDataset(
        numbers(SAMPLES, FEATURES, dtype=t.dtype), numbers(SAMPLES, FEATURES, seed=3, dtype=t.dtype)
    )

    def optimizer(_: Any) -> Any:
        made = sgd([p for p in model.parameters() if p.requires_grad])
        if t.by_hand:
            made.register_step_post_hook(lambda *_: follow(model))
        return made

    more = {} if t.by_hand else {"fit": {"callbacks": [Follow()]}}
    return t.train(model, data, lambda m, b: m(*b), optimizer, sync_bn=True, **more)


class Transfer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


def transfer(t: Trial) -> nn.Module:
    """A pretrained backbone that is to stay as it is: frozen, its statistics too."""
    model = seeded(Transfer, t.dtype)
    model.backbone.requires_grad_(False).eval()
    return model


@case(GROUP, "backbone in eval mode and frozen before fit")
def frozen_backbone(t: Trial) -> Outcome:
    return t.train(transfer(t), classes(t.dtype), nn.CrossEntropyLoss(), adamw)


@case(GROUP, "backbone in eval mode and frozen, own loop with evaluate() after each epoch")
def frozen_backbone_steps(t: Trial) -> Outcome:
    model, data = transfer(t), classes(t.dtype)
    if t.by_hand:
        return plain(t, model, data, cross_entropy, adamw)
    manager = t.manager(global_batch_size=BATCH)
    _, loader, val_loader = manager.setup_training(
        model, data, data, loss_fn=cross_entropy, optimizer=adamw
    )
    for _ in range(2):
        for batch in loader:
            manager.trainer.train_step(batch)
        manager.evaluate(val_loader)
    manager.finish()
    return outcome(model)


class OwnTrain(Transfer):
    """The usual way: train() itself keeps the backbone in eval mode."""

    def train(self, mode: bool = True) -> OwnTrain:
        super().train(mode)
        self.backbone.eval()
        return self


@case(GROUP, "backbone kept in eval mode by its own train(), sync_bn")
def own_train(t: Trial) -> Outcome:
    model = seeded(OwnTrain, t.dtype)
    model.backbone.requires_grad_(False).eval()
    return t.train(model, classes(t.dtype, 25), nn.CrossEntropyLoss(), adamw, sync_bn=True)


@case(GROUP, "experts without work, clipping by norm", point=11)
def experts_clipped(t: Trial) -> Outcome:
    return routed(t, 25, clip=0.1)
