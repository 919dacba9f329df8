"""torchrun --standalone --nproc-per-node=2 hf_trainer_before.py"""

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

set_seed(0)
tokens = torch.randint(100, (363, 12))
labels = (tokens[:, 0] > 50).long()
samples = [{"input_ids": t, "labels": y} for t, y in zip(tokens, labels, strict=True)]
model = BertForSequenceClassification(
    BertConfig(
        vocab_size=100,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
)


def compute_metrics(found):
    return {"accuracy": (found.predictions.argmax(-1) == found.label_ids).mean()}


trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="model",
        per_device_train_batch_size=16,
        num_train_epochs=3,
        learning_rate=1e-3,
        train_sampling_strategy="sequential",
        eval_strategy="epoch",
        save_strategy="epoch",
    ),
    train_dataset=samples[:301],
    eval_dataset=samples[301:],
    compute_metrics=compute_metrics,
)
trainer.train()
trainer.save_model()
