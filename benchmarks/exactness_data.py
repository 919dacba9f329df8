"""Cases of exactness.py: samplers, loaders, streams and collate functions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
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
    as_function,
    case,
    classes,
    cross_entropy,
    history,
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
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from multi_gpu_training.data.order import derive_seed, seed_everything

GROUP = "Samplers and loaders"


def through(
    t: Trial,
    loader: Any,
    batches: Any,
    model: nn.Module | None = None,
    loss: Any = None,
    optimizer: Any = sgd,
    ours: Any = None,
    count: Any = None,
    **settings: Any,
) -> Outcome:
    """fit(loader), or by hand over `batches(epoch)`; `count(batch)`: samples of a batch."""
    model = mlp(t.dtype) if model is None else model
    loss = nn.CrossEntropyLoss() if loss is None else loss
    if t.by_hand:
        called = as_function(loss)

        def counted(model: nn.Module, batch: Any) -> Any:
            found = called(model, batch)
            return found if count is None or isinstance(found, tuple) else (found, count(batch))

        return plain_loop(model, batches, counted, optimizer(model.parameters()))
    settings = {"global_batch_size": BATCH, **settings}
    manager = t.manager(**{k: v for k, v in settings.items() if v is not None})
    given = loss if ours is None else ours
    result = manager.fit(model, loader, loss_fn=given, optimizer=optimizer)
    return outcome(model, **history(result))


def drawn(sampler: Any, data: Any, size: int = BATCH, generator: Any = None) -> Any:
    """Batches of a sampler's order. It is seeded as the docs say: by seed and epoch, whatever
    seed its generator was made with."""

    def batches(epoch: int) -> Iterator[Any]:
        seed_everything(derive_seed(0, epoch))
        if generator is not None:
            generator.manual_seed(derive_seed(0, epoch))
        order = [int(i) for i in sampler]
        for start in range(0, len(order), size):
            yield default_collate([data[i] for i in order[start : start + size]])

    return batches


@case(GROUP, "SubsetRandomSampler")
def subset_sampler(t: Trial) -> Outcome:
    data = classes(t.dtype, 40)
    sampler = SubsetRandomSampler(range(3, 38, 2))
    return through(t, DataLoader(data, batch_size=BATCH, sampler=sampler), drawn(sampler, data))


@case(GROUP, "SubsetRandomSampler for training and validation", point=1)
def subset_validation(t: Trial) -> Outcome:
    data, model = classes(t.dtype, 40), mlp(t.dtype)
    train, held = SubsetRandomSampler(range(25)), SubsetRandomSampler(range(25, 40))
    if t.by_hand:
        found = through(t, None, drawn(train, data), model)
        x, y = data[25:40]
        with torch.no_grad():
            found.numbers["validation"] = float(F.cross_entropy(model(x), y))
            found.numbers["accuracy"] = float((model(x).argmax(1) == y).double().mean())
        return found
    manager = t.manager(global_batch_size=BATCH)
    result = manager.fit(
        model,
        DataLoader(data, batch_size=BATCH, sampler=train),
        DataLoader(data, batch_size=BATCH, sampler=held),
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=sgd,
    )
    last = result.metrics
    return outcome(model, **history(result), validation=last["loss"], accuracy=last["accuracy"])


@case(GROUP, "WeightedRandomSampler with a generator", float32=True)
def weighted_sampler(t: Trial) -> Outcome:
    data, generator = classes(t.dtype), torch.Generator().manual_seed(99)
    sampler = WeightedRandomSampler(torch.arange(1.0, 27.0), 30, generator=generator)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    return through(t, loader, drawn(sampler, data, generator=generator))


@case(GROUP, "RandomSampler with replacement, more samples than there are")
def replacement(t: Trial) -> Outcome:
    data, generator = classes(t.dtype), torch.Generator()
    sampler = RandomSampler(data, replacement=True, num_samples=35, generator=generator)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    return through(t, loader, drawn(sampler, data, generator=generator))


class EveryOther(Sampler[int]):
    """Own order by set_epoch, as numpy integers."""

    def __init__(self, samples: int) -> None:
        self.samples, self.epoch = samples, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.RandomState(5 + self.epoch).permutation(self.samples))


@case(GROUP, "own sampler with set_epoch")
def own_sampler(t: Trial) -> Outcome:
    data = classes(t.dtype)

    def batches(epoch: int) -> Iterator[Any]:
        order = np.random.RandomState(5 + epoch).permutation(SAMPLES)
        for start in range(0, SAMPLES, BATCH):
            yield default_collate([data[i] for i in order[start : start + BATCH]])

    return through(t, DataLoader(data, batch_size=BATCH, sampler=EveryOther(SAMPLES)), batches)


@case(GROUP, "BatchSampler, sizes from it alone", point=10)
def batch_sampler(t: Trial) -> Outcome:
    data = classes(t.dtype)
    sampler = BatchSampler(SequentialSampler(data), 6, drop_last=False)
    loader = DataLoader(data, batch_sampler=sampler)
    return through(t, loader, lambda _: loader, global_batch_size=None)


@case(GROUP, "BatchSampler with drop_last, global_batch_size set", point=10)
def batch_sampler_drops(t: Trial) -> Outcome:
    data = classes(t.dtype)
    sampler = BatchSampler(SequentialSampler(data), BATCH, drop_last=True)
    loader = DataLoader(data, batch_sampler=sampler)
    return through(t, loader, lambda _: loader)


class Buckets(Sampler[list[int]]):
    """Batches of sizes from 1 to 9."""

    sizes = (5, 1, 9, 3, 8)

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for size in self.sizes:
            yield list(range(start, start + size))
            start += size


@case(GROUP, "own batch sampler of varying sizes", float32=True)
def buckets(t: Trial) -> Outcome:
    loader = DataLoader(classes(t.dtype), batch_sampler=Buckets())
    return through(t, loader, lambda _: loader)


@case(GROUP, "own batch sampler of varying sizes, no sizes in the config")
def buckets_alone(t: Trial) -> Outcome:
    loader = DataLoader(classes(t.dtype), batch_sampler=Buckets())
    return through(t, loader, lambda _: loader, global_batch_size=None)


@case(GROUP, "batch_size=None: the dataset gives whole batches")
def whole_batches(t: Trial) -> Outcome:
    x, y = classes(t.dtype).tensors
    parts = [(0, 7), (7, 8), (8, 17), (17, 26)]
    data = Items(len(parts), lambda i: (x[slice(*parts[i])], y[slice(*parts[i])]))
    loader = DataLoader(data, batch_size=None)
    return through(t, loader, lambda _: loader, global_batch_size=None)


@case(GROUP, "DataLoader(drop_last=True)")
def drop_last(t: Trial) -> Outcome:
    loader = DataLoader(classes(t.dtype), batch_size=BATCH, drop_last=True)
    return through(t, loader, lambda _: loader)


@case(GROUP, "two workers, and what they draw per sample")
def workers(t: Trial) -> Outcome:
    data = classes(t.dtype)

    def item(i: int) -> tuple[Tensor, Tensor]:
        x, y = data[i]
        noise = torch.randn(FEATURES) + np.random.rand() + random.random()
        return x + 0.1 * noise.to(x.dtype), y

    noisy = Items(SAMPLES, item)

    def batches(epoch: int) -> Iterator[Any]:
        for start in range(0, SAMPLES, BATCH):
            samples = []
            for i in range(start, min(start + BATCH, SAMPLES)):
                seed_everything(derive_seed(derive_seed(0, epoch), i))
                samples.append(noisy[i])
            yield default_collate(samples)

    return through(t, DataLoader(noisy, batch_size=BATCH, num_workers=2), batches)


class Stream(IterableDataset[Any]):
    def __init__(self, samples: int, dtype: torch.dtype) -> None:
        self.data = classes(dtype, samples)

    def __iter__(self) -> Iterator[Any]:
        for i in range(len(self.data)):
            yield self.data[i]


def streamed(t: Trial, samples: int, **how: Any) -> Outcome:
    stream = Stream(samples, t.dtype)
    loader = DataLoader(stream, batch_size=BATCH)
    return through(t, stream, lambda _: loader, **how)


@case(GROUP, "finite stream, 1 sample in the last step")
def stream(t: Trial) -> Outcome:
    return streamed(t, 25)


@case(GROUP, "finite stream shorter than the ranks")
def stream_short(t: Trial) -> Outcome:
    return streamed(t, 3)


def normed(dtype: torch.dtype) -> nn.Module:
    return seeded(
        lambda: nn.Sequential(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES)
        ),
        dtype,
    )


@case(GROUP, "finite stream shorter than the ranks, sync_bn", point=18)
def stream_batchnorm(t: Trial) -> Outcome:
    return streamed(t, 2, model=normed(t.dtype), **({} if t.by_hand else {"sync_bn": True}))


@case(GROUP, "finite stream of 26 samples, sync_bn")
def stream_longer_batchnorm(t: Trial) -> Outcome:
    return streamed(t, 26, model=normed(t.dtype), **({} if t.by_hand else {"sync_bn": True}))


@case(GROUP, "stream in a DataLoader with a worker and own collate")
def stream_loader(t: Trial) -> Outcome:
    stream = Stream(25, t.dtype)

    def collate(samples: list[Any]) -> dict[str, Tensor]:
        return {
            "x": torch.stack([x for x, _ in samples]),
            "y": torch.stack([y for _, y in samples]),
        }

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    plain = DataLoader(stream, batch_size=BATCH, collate_fn=collate)
    loader = DataLoader(stream, batch_size=BATCH, collate_fn=collate, num_workers=1)
    return through(t, loader, lambda _: plain, loss=loss)


@case(GROUP, "fewer samples than ranks: 2 samples")
def two_samples(t: Trial) -> Outcome:
    return t.train(mlp(t.dtype), classes(t.dtype, 2), nn.CrossEntropyLoss(), sgd)


@case(GROUP, "a list of tuples, and Subset of ConcatDataset")
def nested_datasets(t: Trial) -> Outcome:
    x, y = classes(t.dtype).tensors
    listed = [(x[i], int(y[i])) for i in range(SAMPLES)]
    data = Subset(ConcatDataset([listed[:10], listed[10:]]), list(range(25, -1, -1)))  # type: ignore[list-item]
    return t.train(mlp(t.dtype), data, cross_entropy, sgd, shuffle=True)


@case(GROUP, "sampler of keys that are not numbers")
def keyed(t: Trial) -> Outcome:
    x, y = classes(t.dtype).tensors

    class Table(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, key: str) -> Any:
            return x[int(key[1:])], y[int(key[1:])]

    keys = [f"k{i}" for i in range(SAMPLES)]
    loader = DataLoader(Table(), batch_size=BATCH, sampler=keys)
    return through(t, loader, lambda _: loader)


# Collate functions


def collated(t: Trial, collate: Any, loss: Any, count: Any = None, data: Any = None) -> Outcome:
    loader = DataLoader(data or classes(t.dtype, 25), batch_size=BATCH, collate_fn=collate)
    return through(t, loader, lambda _: loader, loss=loss, count=count)


@case(GROUP, "collate to nested dicts, lists and strings")
def nested(t: Trial) -> Outcome:
    def collate(samples: list[Any]) -> dict[str, Any]:
        return {
            "names": [f"sample {i}" for i in range(len(samples))],
            "inputs": {"x": torch.stack([x for x, _ in samples]), "more": [1.0, None]},
            "targets": [torch.stack([y for _, y in samples])],
        }

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["inputs"]["x"]), batch["targets"][0])

    return collated(t, collate, loss, lambda b: len(b["names"]))


@case(GROUP, "collate with a scalar tensor first", point=13)
def scalar_first(t: Trial) -> Outcome:
    def collate(samples: list[Any]) -> Any:
        x = torch.stack([x for x, _ in samples])
        return torch.tensor(0.5, dtype=x.dtype), x, torch.stack([y for _, y in samples])

    def loss(model: nn.Module, batch: Any) -> Tensor:
        scale, x, y = batch
        return F.cross_entropy(scale * model(x), y)

    return collated(t, collate, loss, lambda b: len(b[2]))


@case(GROUP, "collate to lists of tensors of different lengths (detection)")
def ragged(t: Trial) -> Outcome:
    everything = numbers(25, 9, FEATURES, dtype=t.dtype)
    data = Items(25, lambda i: (everything[i, : 1 + i % 7], i % CLASSES))

    def collate(samples: list[Any]) -> Any:
        return [x for x, _ in samples], [y for _, y in samples]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        logits = torch.stack([model(boxes).mean(0) for boxes in batch[0]])
        return F.cross_entropy(logits, torch.tensor(batch[1]))

    return collated(t, collate, loss, lambda b: len(b[1]), data)


@case(GROUP, "collate to one concatenated graph with a batch vector (PyG style)")
def concatenated(t: Trial) -> Outcome:
    everything = numbers(25, 9, FEATURES, dtype=t.dtype)
    data = Items(25, lambda i: (everything[i, : 1 + i % 7], i % CLASSES))

    def collate(samples: list[Any]) -> Any:
        owner = [torch.full((len(x),), i) for i, (x, _) in enumerate(samples)]
        y = torch.tensor([y for _, y in samples])
        return {"nodes": torch.cat([x for x, _ in samples]), "owner": torch.cat(owner), "y": y}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        each = model(batch["nodes"])
        pooled = each.new_zeros(len(batch["y"]), CLASSES).index_add(0, batch["owner"], each)
        return F.cross_entropy(pooled, batch["y"])

    return collated(t, collate, loss, lambda b: len(b["y"]), data)


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@case(GROUP, "collate to a named tuple")
def named(t: Trial) -> Outcome:
    def collate(samples: list[Any]) -> Pair:
        return Pair(*default_collate(samples))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch.x), batch.y)

    return collated(t, collate, loss)


class OwnBatch:
    """A class of the user's, with a `to` as torch objects have."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def to(self, device: Any) -> OwnBatch:
        return OwnBatch(self.x.to(device), self.y.to(device))


@case(GROUP, "collate to an object of the user's class")
def objects(t: Trial) -> Outcome:
    def collate(samples: list[Any]) -> OwnBatch:
        return OwnBatch(*default_collate(samples))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch.x), batch.y)

    return collated(t, collate, loss, lambda b: len(b.y))


@case(GROUP, "collate to BatchEncoding, default loss and validation", point=21, left_out=("key.b",))
def encodings(t: Trial) -> Outcome:
    from exactness_models import bert_config, sentences
    from transformers import BatchEncoding, BertForSequenceClassification

    model = seeded(lambda: BertForSequenceClassification(bert_config()), t.dtype)
    inner = sentences()
    data = Items(SAMPLES, lambda i: {**inner[i], "labels": i % CLASSES})

    def collate(samples: list[Any]) -> Any:
        return BatchEncoding(default_collate(samples))

    loader = DataLoader(data, batch_size=BATCH, collate_fn=collate)
    if t.by_hand:

        def loss(model: nn.Module, batch: Any) -> Any:
            return model(**batch).loss, len(batch["labels"])

        found = plain_loop(model, lambda _: loader, loss, sgd(model.parameters()))
        with torch.no_grad():
            sums = [(float(model(**b).loss) * len(b["labels"]), len(b["labels"])) for b in loader]
        found.numbers["validation"] = sum(s for s, _ in sums) / sum(n for _, n in sums)
        return found
    manager = t.manager(global_batch_size=BATCH)
    result = manager.fit(model, loader, loader, optimizer=sgd)
    return outcome(model, **history(result), validation=result.metrics["loss"])


@case(GROUP, "collate that pads to the longest of its samples, masked mean with weight")
def padding(t: Trial) -> Outcome:
    everything = numbers(25, 9, FEATURES, dtype=t.dtype)
    data = Items(25, lambda i: (everything[i, : 1 + i % 7], everything[i, : 1 + i % 7, :1]))

    def collate(samples: list[Any]) -> Any:
        from torch.nn.utils.rnn import pad_sequence

        mask = pad_sequence([torch.ones(len(x)) for x, _ in samples], batch_first=True)
        return (
            pad_sequence([x for x, _ in samples], batch_first=True),
            mask.to(samples[0][0].dtype),
            pad_sequence([y for _, y in samples], batch_first=True),
        )

    def loss(model: nn.Module, batch: Any) -> Any:
        x, mask, y = batch
        return ((model(x) - y)[..., 0] ** 2 * mask).sum() / mask.sum(), mask.sum()

    loader = DataLoader(data, batch_size=BATCH, collate_fn=collate)
    return through(t, loader, lambda _: loader, mlp(t.dtype, out=1), loss)


@case(GROUP, "batch_size given as well: micro-batches of 2 per rank", against_one=True)
def both_sizes(t: Trial) -> Outcome:
    # On four ranks one micro-batch of 8, on one rank four of 2: the same without BatchNorm.
    return t.train(mlp(t.dtype), classes(t.dtype), nn.CrossEntropyLoss(), adamw, batch_size=2)


@case(GROUP, "validation in uneven shares: loss, accuracy and macro F1")
def validation(t: Trial) -> Outcome:
    model, data, held = mlp(t.dtype), classes(t.dtype), classes(t.dtype, 37)
    if t.by_hand:
        found = t.train(model, data, nn.CrossEntropyLoss(), adamw)
        x, y = held.tensors
        with torch.no_grad():
            logits = model(x)
        found.numbers["validation"] = float(F.cross_entropy(logits, y))
        guess, scores = logits.argmax(1), []
        found.numbers["accuracy"] = float((guess == y).double().mean())
        for c in range(CLASSES):
            hits = int(((guess == c) & (y == c)).sum())
            scores.append(2 * hits / int((guess == c).sum() + (y == c).sum()))
        found.numbers["f1"] = sum(scores) / CLASSES
        return found
    manager = t.manager(global_batch_size=BATCH)
    result = manager.fit(model, data, held, loss_fn=nn.CrossEntropyLoss(), optimizer=adamw)
    m = result.metrics
    numbers = {"validation": m["loss"], "accuracy": m["accuracy"], "f1": m["f1"]}
    return outcome(model, **history(result), **numbers)


@case(GROUP, "validation with shares in which no label counts", point=6)
def empty_validation(t: Trial) -> Outcome:
    model, data = mlp(t.dtype), classes(t.dtype)
    x, y = classes(t.dtype, 16).tensors
    y = y.clone()
    y[:6] = -100
    if t.by_hand:
        found = t.train(model, data, nn.CrossEntropyLoss(), adamw)
        with torch.no_grad():
            found.numbers["validation"] = float(F.cross_entropy(model(x), y))
        return found

    def eval_fn(model: nn.Module, batch: Any, metrics: Any) -> None:
        x, y = batch
        count = (y != -100).sum()
        metrics.add("loss", F.cross_entropy(model(x), y, reduction="sum"), count)

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(model(x), y), (y != -100).sum()

    manager = t.manager(global_batch_size=BATCH)
    result = manager.fit(model, data, TensorDataset(x, y), loss_fn=loss_fn, optimizer=adamw)
    return outcome(model, **history(result), validation=result.metrics["loss"])


@case(GROUP, "validation through a stream, regression, ReduceLROnPlateau follows it")
def stream_validation(t: Trial) -> Outcome:
    model, data = mlp(t.dtype, out=1), values(t.dtype)
    held = values(t.dtype, 19)

    class Held(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return (held[i] for i in range(19))

    def plateau(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0)

    def fast(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, lr=0.4)

    if t.by_hand:
        optimizer = fast(model.parameters())
        scheduler = plateau(optimizer)
        loader = DataLoader(data, batch_size=BATCH)

        def validate(epoch: int) -> None:
            with torch.no_grad():
                scheduler.step(float(squares(model, held.tensors)))

        found = plain_loop(
            model, lambda _: loader, squares, optimizer, epochs=6, after_epoch=validate
        )
        found.numbers["rate"] = optimizer.param_groups[0]["lr"]
        return found
    manager = t.manager(global_batch_size=BATCH, epochs=6)
    result = manager.fit(model, data, Held(), loss_fn=squares, optimizer=fast, scheduler=plateau)
    return outcome(model, **history(result), rate=manager.optimizer.param_groups[0]["lr"])


@case(GROUP, "labels and images of different types: uint8, bool, int32")
def types(t: Trial) -> Outcome:
    data = TensorDataset(
        integers(256, SAMPLES, FEATURES).to(torch.uint8),
        integers(2, SAMPLES, FEATURES, seed=2).bool(),
        integers(CLASSES, SAMPLES, seed=3).int(),
    )

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, keep, y = batch
        return F.cross_entropy(model(x.to(t.dtype) / 255 * keep), y.long())

    return t.train(mlp(t.dtype), data, loss, sgd, shuffle=True)


@case(GROUP, "stream with steps_per_epoch: epochs go on where the last one ended")
def stream_steps(t: Trial) -> Outcome:
    stream = Stream(25, t.dtype)
    model = mlp(t.dtype)
    if t.by_hand:
        passes = [batch for _ in range(3) for batch in DataLoader(stream, batch_size=BATCH)]
        return plain_loop(
            model, lambda e: passes[3 * e : 3 * e + 3], cross_entropy, sgd(model.parameters()),
            epochs=3,
        )  # fmt: skip
    manager = t.manager(global_batch_size=BATCH, steps_per_epoch=3, epochs=3)
    result = manager.fit(model, stream, loss_fn=cross_entropy, optimizer=sgd)
    return outcome(model, **history(result))


class Drawing(IterableDataset[Any]):
    """Draws from a generator of its own and from torch's."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.generator = dtype, torch.Generator().manual_seed(4)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(25):
            x = torch.randn(FEATURES, generator=self.generator) + torch.randn(FEATURES)
            yield x.to(self.dtype), int(x.sum() > 0)


@case(GROUP, "stream that draws its samples", against_one=True)
def stream_draws(t: Trial) -> Outcome:
    return through(t, Drawing(t.dtype), None)


@case(GROUP, "validation with ignored labels, no eval_fn")
def ignored_validation(t: Trial) -> Outcome:
    model, data = mlp(t.dtype), classes(t.dtype)
    x, y = classes(t.dtype, 16).tensors
    y = y.clone()
    y[::3] = -100
    if t.by_hand:
        found = t.train(model, data, nn.CrossEntropyLoss(), adamw)
        with torch.no_grad():
            found.numbers["validation"] = float(F.cross_entropy(model(x), y))
            right = (model(x).argmax(1) == y)[y != -100]
            found.numbers["accuracy"] = float(right.double().mean())
        return found
    manager = t.manager(global_batch_size=BATCH)
    result = manager.fit(
        model, data, TensorDataset(x, y), loss_fn=nn.CrossEntropyLoss(), optimizer=adamw
    )
    last = result.metrics
    return outcome(model, **history(result), validation=last["loss"], accuracy=last["accuracy"])


@case(GROUP, "training accuracy with ignored labels")
def ignored_accuracy(t: Trial) -> Outcome:
    model = mlp(t.dtype)
    x, y = classes(t.dtype, 16).tensors
    y = y.clone()
    y[::3] = -100
    data = TensorDataset(x, y)
    if t.by_hand:
        right = count = 0
        optimizer = sgd(model.parameters())
        for x, y in DataLoader(data, batch_size=BATCH):
            optimizer.zero_grad()
            logits = model(x)
            F.cross_entropy(logits, y).backward()
            optimizer.step()
            right += int((logits.argmax(1) == y)[y != -100].sum())
            count += int((y != -100).sum())
        return outcome(model, accuracy=right / count)
    manager = t.manager(global_batch_size=BATCH, epochs=1)
    result = manager.fit(model, data, loss_fn=nn.CrossEntropyLoss(), optimizer=sgd)
    return outcome(model, accuracy=result.history[0]["train"]["accuracy"])


@case(GROUP, "validation of 2 samples in batches of a batch sampler")
def small_validation(t: Trial) -> Outcome:
    model, data, held = mlp(t.dtype), classes(t.dtype), classes(t.dtype, 2)
    if t.by_hand:
        found = t.train(model, data, cross_entropy, adamw)
        with torch.no_grad():
            found.numbers["validation"] = float(cross_entropy(model, held.tensors))
        return found
    manager = t.manager(global_batch_size=BATCH)
    loader = DataLoader(held, batch_sampler=[[0], [1]])
    result = manager.fit(model, data, loader, loss_fn=cross_entropy, optimizer=adamw)
    return outcome(model, **history(result), validation=result.metrics["loss"])


class Levels(torch.utils.data.Dataset[Any]):
    """A curriculum: set_epoch of the dataset changes its samples."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.data, self.level = classes(dtype, 25), 0

    def set_epoch(self, epoch: int) -> None:
        self.level = epoch

    def __len__(self) -> int:
        return 25

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        return x * (1 + self.level), y


@case(GROUP, "dataset with set_epoch, called by the user before each epoch")
def levels(t: Trial) -> Outcome:
    data, model = Levels(t.dtype), mlp(t.dtype)
    if t.by_hand:

        def batches(epoch: int) -> Any:
            data.set_epoch(epoch)
            return DataLoader(data, batch_size=BATCH)

        found = plain_loop(model, batches, cross_entropy, sgd(model.parameters()), epochs=3)
        return Outcome(found.tensors)
    manager = t.manager(global_batch_size=BATCH, epochs=3)
    _, loader, _ = manager.setup_training(model, data, loss_fn=cross_entropy, optimizer=sgd)
    for epoch in range(3):
        data.set_epoch(epoch)
        manager.train_epoch(loader, epoch)
    manager.finish()
    return outcome(model)


@case(GROUP, "DataLoader(shuffle=True)")
def shuffling_loader(t: Trial) -> Outcome:
    data = classes(t.dtype, 25)
    return t.train(mlp(t.dtype), data, nn.CrossEntropyLoss(), sgd, shuffle=True, loader={})


@case(GROUP, "RandomSampler of 11 samples per epoch, without replacement")
def few_of_many(t: Trial) -> Outcome:
    data, generator = classes(t.dtype), torch.Generator()
    sampler = RandomSampler(data, num_samples=11, generator=generator)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    return through(t, loader, drawn(sampler, data, generator=generator))


@case(GROUP, "DistributedSampler, as in a script for DDP")
def distributed_sampler(t: Trial) -> Outcome:
    data = classes(t.dtype, 25)
    if t.by_hand:
        return t.train(mlp(t.dtype), data, nn.CrossEntropyLoss(), sgd)
    sampler = DistributedSampler(data, num_replicas=t.world, rank=t.rank, shuffle=False)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    return through(t, loader, None)


@case(GROUP, "no optimizer given, no sizes but global_batch_size, three epochs")
def defaults(t: Trial) -> Outcome:
    data, model = classes(t.dtype, 25), mlp(t.dtype)
    if t.by_hand:
        return t.train(
            model, data, nn.CrossEntropyLoss(),
            lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.1), epochs=3, shuffle=True,
        )  # fmt: skip
    manager = t.manager(global_batch_size=BATCH, shuffle=True, learning_rate=3e-3, weight_decay=0.1)
    return outcome(model, **history(manager.fit(model, data, epochs=3)))


@case(GROUP, "validation and training by two DataLoaders with workers that stay")
def lasting_workers(t: Trial) -> Outcome:
    data, model = Levels(t.dtype), mlp(t.dtype)
    if t.by_hand:
        found = t.train(model, data, cross_entropy, sgd, epochs=3)
        with torch.no_grad():
            found.numbers["validation"] = float(cross_entropy(model, data.data.tensors))
        return found
    how: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 3}
    manager = t.manager(global_batch_size=BATCH, epochs=3)
    loaders = [DataLoader(data, batch_size=BATCH, **how) for _ in range(2)]
    result = manager.fit(model, *loaders, loss_fn=cross_entropy, optimizer=sgd)
    return outcome(model, **history(result), validation=result.metrics["loss"])


class Shards(IterableDataset[Any]):
    """Whole batches, as WebDataset gives them."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.data = classes(dtype)

    def __iter__(self) -> Iterator[Any]:
        for begin, end in [(0, 7), (7, 8), (8, 17), (17, 26)]:
            yield self.data[begin:end]


@case(GROUP, "batch_size=None: a stream of whole batches")
def stream_of_batches(t: Trial) -> Outcome:
    loader = DataLoader(Shards(t.dtype), batch_size=None)
    return through(t, loader, lambda _: loader, global_batch_size=None)


@case(GROUP, "stream in a DataLoader with drop_last")
def stream_drops(t: Trial) -> Outcome:
    loader = DataLoader(Stream(25, t.dtype), batch_size=BATCH, drop_last=True)
    return through(t, loader, lambda _: loader)
