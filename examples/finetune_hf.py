"""Fine-tune a Hugging Face classifier on your texts. Nothing is downloaded.

    python examples/finetune_hf.py                         # a tiny BERT: is a line code or prose?
    python examples/finetune_hf.py --model-dir bert-base --data reviews.csv
    mgt run --num-gpus 2 examples/finetune_hf.py --tiny

--model-dir is a folder of `save_pretrained` with a tokenizer, --data a CSV with the columns `text`
and `label`. The model computes its own loss, so `fit` needs none. `eval_fn` counts correct
answers.
"""

import argparse
import csv
import inspect
from pathlib import Path

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
)

from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager


def read_texts(path: Path | None) -> list[tuple[str, str]]:
    """Pairs of text and label."""
    if path is not None:
        with path.open(newline="") as file:
            return [(row["text"], row["label"]) for row in csv.DictReader(file)]
    from pydoc_data.topics import topics

    code = inspect.getsource(argparse).splitlines()
    prose = "\n".join(topics.values()).splitlines()
    pairs = [(line.strip(), "code") for line in code] + [(line.strip(), "prose") for line in prose]
    long = [pair for pair in pairs if len(pair[0]) > 30]
    return long[:1000] + long[-1000:]


def tokenize(texts: list[str], folder: Path | None, length: int) -> dict[str, torch.Tensor]:
    """Token numbers of a fixed length: batches of one shape are recorded as one CUDA graph."""
    if folder is not None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        return dict(
            tokenizer(
                texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt"
            )
        )
    rows = [list(text.encode()[:length]) for text in texts]  # a byte is a token, 0 is padding
    tokens = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    return {"input_ids": tokens, "attention_mask": (tokens > 0).long()}


def eval_fn(model, batch, metrics):
    output = model(**batch)
    count = len(batch["labels"])
    metrics.add("loss", output.loss * count, count)  # sums and weights, never means
    metrics.add_predictions(output.logits.argmax(1), batch["labels"], output.logits.shape[1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a text classifier.")
    parser.add_argument("--model-dir", type=Path, help="without: a small BERT with fresh weights")
    parser.add_argument("--data", type=Path, help="CSV with the columns text and label")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="over all GPUs")
    parser.add_argument("--lr", type=float, help="default: 2e-5 with --model-dir, else 1e-3")
    parser.add_argument("--length", type=int, default=64, help="tokens per text")
    parser.add_argument("--tiny", action="store_true", help="one short epoch")
    args = parser.parse_args()

    manager = MultiGPUTrainingManager(
        MultiGPUConfig(
            global_batch_size=args.batch_size,
            epochs=1 if args.tiny else args.epochs,
            learning_rate=args.lr or (2e-5 if args.model_dir else 1e-3),
            schedule="linear",
            max_grad_norm=1.0,
        )
    )
    pairs = read_texts(args.data)
    labels = sorted({label for _, label in pairs})
    encoded = tokenize([text for text, _ in pairs], args.model_dir, args.length)
    encoded["labels"] = torch.tensor([labels.index(label) for _, label in pairs])
    samples = [{name: rows[i] for name, rows in encoded.items()} for i in range(len(pairs))]
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0)).tolist()
    if args.tiny:
        order = order[:200]
    cut = len(order) * 4 // 5
    train, val = ([samples[i] for i in part] for part in (order[:cut], order[cut:]))

    torch.manual_seed(0)
    if args.model_dir:
        model = AutoModelForSequenceClassification.from_pretrained(
            args.model_dir, num_labels=len(labels)
        )
    else:
        size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        # Dropout differs between ranks; without it, any number of GPUs computes the same.
        no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = BertConfig(vocab_size=256, intermediate_size=128, **size, **no_dropout)
        config.num_labels = len(labels)
        model = BertForSequenceClassification(config)
    result = manager.fit(model, train, val, eval_fn=eval_fn)
    manager.say(f"{', '.join(labels)}: {result.metrics['accuracy']:.1%} correct")


if __name__ == "__main__":
    main()
