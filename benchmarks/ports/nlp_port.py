"""accelerate's nlp_example: a BERT on pairs of sentences, padded per batch, linear schedule with
warm-up, accuracy and F1 on the validation data. The model is tiny and the tokens are made up."""

import torch
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    get_linear_schedule_with_warmup,
)

from multi_gpu_training import MultiGPUTrainingManager

BATCH, EVAL_BATCH, EPOCHS, RATE, WARMUP = 8, 10, 2, 1e-3, 2


def build():
    torch.manual_seed(42)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=40,
            hidden_size=12,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def pairs(count, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 9, (count,), generator=generator).tolist()
    texts = [torch.randint(1, 40, (length,), generator=generator) for length in lengths]
    return [{"input_ids": text, "label": int(text.sum()) % 2} for text in texts]


def collate(samples):
    texts = [sample["input_ids"] for sample in samples]
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    labels = torch.tensor([sample["label"] for sample in samples])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def original(model, device="cpu"):
    train_loader = DataLoader(pairs(21, 0), batch_size=BATCH, collate_fn=collate)
    eval_loader = DataLoader(pairs(17, 1), batch_size=EVAL_BATCH, collate_fn=collate)
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    scheduler = get_linear_schedule_with_warmup(optimizer, WARMUP, len(train_loader) * EPOCHS)
    for epoch in range(EPOCHS):
        model.train()
        for batch in train_loader:
            batch = {name: part.to(device) for name, part in batch.items()}
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        predictions, references = [], []
        for batch in eval_loader:
            batch = {name: part.to(device) for name, part in batch.items()}
            with torch.no_grad():
                predictions.append(model(**batch).logits.argmax(-1))
            references.append(batch["labels"])
        found, wanted = torch.cat(predictions), torch.cat(references)
        scores = []
        for label in range(2):
            hits = ((found == label) & (wanted == label)).sum()
            scores.append(2 * hits / ((found == label).sum() + (wanted == label).sum()))
        metric = {"accuracy": (found == wanted).double().mean().item()}
        metric["f1"] = torch.stack(scores).mean().item()
        print(f"epoch {epoch}: {metric}")
    return metric


def ported(model, config):
    config.epochs, config.global_batch_size = EPOCHS, BATCH
    manager = MultiGPUTrainingManager(config)
    train_loader = DataLoader(pairs(21, 0), batch_size=BATCH, collate_fn=collate)
    steps = manager.steps_per_epoch(train_loader) * EPOCHS

    def eval_fn(model, batch, metrics):
        output = model(**batch)
        metrics.add("loss", output.loss * len(batch["labels"]), len(batch["labels"]))
        metrics.add_predictions(output.logits.argmax(-1), batch["labels"], classes=2)

    result = manager.fit(
        model,
        train_loader,
        DataLoader(pairs(17, 1), batch_size=EVAL_BATCH, collate_fn=collate),
        eval_fn=eval_fn,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=RATE),
        scheduler=lambda optimizer: get_linear_schedule_with_warmup(optimizer, WARMUP, steps),
    )
    return {name: result.metrics[name] for name in ("accuracy", "f1")}
