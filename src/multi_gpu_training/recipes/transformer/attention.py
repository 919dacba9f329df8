"""Causal attention over packed text, or text padded at its end, without a mask.

PyTorch's attention has its fastest kernels for plain causal attention, where no mask is given.
`transformers` finds out in each forward pass whether it may leave the mask out, which reads a
number back from the GPU; and where the model is compiled it cannot find out, builds a mask of
(batch, tokens, tokens) and gets the slower kernels. Text without padding in front never needs
one, so none is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from multi_gpu_training.torch_internals import attention_implementation

NAME = "mgt_causal"


def use_causal_attention(model: Any, length: int, probe: Any = None) -> bool:
    """Let `model` attend to all tokens before, without a mask; False where that is not its way.
    probe: a smaller one of its kind, to try that out on."""
    if probe is not None:
        if use_causal_attention(probe, length):
            model.set_attn_implementation(NAME)
            _silence(model)
        return attention_implementation(model.config) == NAME
    config = model.config
    before = attention_implementation(config)
    if before != "sdpa" or not attends_to_all(config, length):
        return False
    from transformers import AttentionInterface

    expected = try_out(model, length)
    # No mask function of that name is registered: transformers then makes none.
    AttentionInterface.register(NAME, causal_attention)
    model.set_attn_implementation(NAME)
    if attention_implementation(config) != NAME:
        return False
    # Another kernel rounds differently; a model that attends otherwise is far off.
    if not torch.allclose(try_out(model, length), expected, rtol=1e-3, atol=1e-4):
        model.set_attn_implementation(before)
        return False
    _silence(model)
    return True


def _silence(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = no_padding


def attends_to_all(config: Any, length: int) -> bool:
    """Whether each token sees every token before it, in all layers, within `length`."""
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    plain = kinds == {"full_attention"} and getattr(config, "is_causal", True)
    parts = getattr(config, "sub_configs", None)
    return bool(plain and not parts and (window is None or window >= length))


def try_out(model: Any, length: int) -> Tensor:
    """What the model says to a few tokens, at most `length`."""
    ids = torch.arange(min(length, 12))[None] % model.config.vocab_size
    with evaluating(model):
        found: Tensor = model(input_ids=ids, use_cache=False).logits
        return found


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Without gradients and dropout, and then as it was."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def causal_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **more: Any,
) -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, query, key, value, attention_mask, **more)


def no_padding(input_ids: Tensor, attention_mask: Tensor | None) -> None:
    """In place of a warning about padding, which reads from the GPU in every forward pass."""
