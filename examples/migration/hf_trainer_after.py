"""python hf_trainer_after.py, or: mgt run --num-gpus 2 hf_trainer_after.py"""

import torch
from multi_gpu_training import MultiGPUConfig, MultiGPUTrainingManager
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    get_linear_schedule_with_warmup,
)

config = MultiGPUConfig(global_batch_size=16, epochs=3, max_grad_norm=1.0, shuffle=False)
manager = MultiGPUTrainingManager(config)

torch.manual_seed(0)
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
steps = 3 * manager.steps_per_epoch(samples[:301])


def compute_metrics(model, batch, metrics):
    output, labels = model(**batch), batch["labels"]
    metrics.add("loss", output.loss * len(labels), len(labels))
    metrics.add_predictions(output.logits.argmax(-1), labels, classes=2)


manager.fit(
    model,
    samples[:301],
    samples[301:],
    eval_fn=compute_metrics,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0),
    scheduler=lambda optimizer: get_linear_schedule_with_warmup(optimizer, 0, steps),
)
