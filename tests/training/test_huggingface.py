"""Hugging Face models train as they are, and labels that count for nothing weigh nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

from multi_gpu_training import ConfigError, MultiGPUConfig, MultiGPUTrainingManager

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Lengths between 2 and 12 tokens, so that ranks hold very different numbers of labels."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(1, 40, (12,), generator=generator)
        length = 12 if index % 5 == 0 else 2 + index % 3
        mask = (torch.arange(12) < length).long()
        if self.kind == "classifier":
            labels = torch.tensor(index % 2)
        else:
            labels = torch.where(mask.bool(), tokens, torch.tensor(-100))
        return {"input_ids": tokens * mask, "attention_mask": mask, "labels": labels}


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 40}
    if kind == "causal":
        settings = transformers.GPT2Config(
            n_embd=16,
            n_layer=1,
            n_head=2,
            vocab_size=40,
            n_positions=16,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        return transformers.GPT2LMHeadModel(settings)
    settings = transformers.BertConfig(
        **small,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    if kind == "masked":
        return transformers.BertForMaskedLM(settings)
    return transformers.BertForSequenceClassification(settings)


def train(folder: Path, kind: str, accumulation: int) -> dict[str, Tensor]:
    config = MultiGPUConfig(
        progress="off",
        tensorboard=False,
        save_dir=str(folder),
        epochs=2,
        global_batch_size=6,
        gradient_accumulation_steps=accumulation,
        enable_fault_tolerance=False,
    )
    model = build(kind).double()
    manager = MultiGPUTrainingManager(config)
    manager.fit(model, Texts(kind), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("kind", ["causal", "masked", "classifier"])
def test_two_and_three_ranks_learn_what_one_learns(
    tmp_path: Path, kind: str, accumulation: int
) -> None:
    reference = run_ranks(1, train, tmp_path, kind, 1)[0]
    for world in (1, 2, 3):
        ours = run_ranks(world, train, tmp_path, kind, accumulation)[0]
        for name, value in reference.items():
            if name.endswith("key.bias"):
                continue  # softmax takes it away: zero gradient, it holds rounding alone
            apart = float((ours[name] - value).norm() / value.norm())
            assert apart <= 1e-6, (world, name, apart)


def test_a_model_without_loss_says_what_to_do(tmp_path: Path) -> None:
    settings = transformers.BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=40,
        intermediate_size=32,
        max_position_embeddings=16,
    )

    class Unlabelled(Texts):
        def __getitem__(self, index: int) -> dict[str, Any]:
            item = super().__getitem__(index)
            item.pop("labels")
            return item

    config = MultiGPUConfig(progress="off", tensorboard=False, save_dir=str(tmp_path), epochs=1)
    manager = MultiGPUTrainingManager(config)
    with pytest.raises(ConfigError, match=r"returned no \.loss .* give loss_fn"):
        manager.fit(transformers.BertModel(settings), Unlabelled("masked"))
