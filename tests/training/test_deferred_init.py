"""A model that is built in parts has the bits of one that is built at once."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from multi_gpu_training.training.strategy.deferred_init import (
    build_deferred,
    materialise,
    source_of,
)

WIDE = 160  # such a matrix is large enough to be left out


class Initialised(nn.Module):
    """Every initialiser of torch, in-place arithmetic, copies, tied weights, buffers."""

    def __init__(self) -> None:
        super().__init__()
        init = nn.init
        ways: list[Callable[[torch.Tensor], object]] = [
            init.uniform_, init.normal_, init.trunc_normal_, init.xavier_uniform_,
            init.xavier_normal_, init.kaiming_uniform_, init.kaiming_normal_, init.orthogonal_,
            init.eye_, init.zeros_, init.ones_, init.dirac_, lambda w: init.sparse_(w, 0.9),
            lambda w: init.trunc_normal_(w, std=5.0), lambda w: w.data.bernoulli_(0.3),
        ]  # fmt: skip
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in ways)
        for way, layer in zip(ways, self.layers, strict=True):
            weight = layer.weight
            shaped = weight.view(WIDE, WIDE // 4, 2, 2) if way is init.dirac_ else weight
            with torch.no_grad():
                way(shaped)
        self.copied = copy.deepcopy(self.layers[0])
        with torch.no_grad():
            self.copied.weight.mul_(2)[3:5] = self.layers[1].weight[0]
            self.copied.weight[:, :7].normal_()
            self.copied.bias.copy_(self.copied.weight[0])
        self.embed = nn.Embedding(300, WIDE, padding_idx=0)
        self.head = nn.Linear(WIDE, 300, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.tril(torch.ones(WIDE, WIDE)))
        self.own = nn.Parameter(torch.randn(WIDE, WIDE, generator=torch.Generator().manual_seed(3)))
        self.scale = float(self.own.detach().abs().mean())  # looks at a weight
        self.recurrent = nn.LSTM(WIDE, WIDE)
        self.recurrent.double()


def hugging_face() -> nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=200, num_hidden_layers=2, **sizes)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("build", [Initialised, hugging_face], ids=lambda build: build.__name__)
def test_weights_computed_later_are_those_of_a_plain_build(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(5)
    plain, after = build(), torch.rand(3)
    torch.manual_seed(5)
    model = build_deferred(build)
    assert torch.equal(torch.rand(3), after)  # the generator stands where it would
    left_out = [name for name, p in model.named_parameters() if p.is_meta]
    assert set(left_out) == {n for n, p in plain.named_parameters() if p.nbytes >= 2**16}
    # In any order, and one at a time.
    source = source_of(model)
    assert source is not None
    found = {name: source.values([name])[name] for name in reversed(left_out)}
    assert all(torch.equal(found[n], p) for n, p in plain.named_parameters() if n in found)
    materialise(model)
    expected, state = plain.state_dict(), model.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert model.state_dict(keep_vars=True).keys() == expected.keys()
    if isinstance(plain, Initialised):
        assert model.head.weight is model.embed.weight and model.scale == plain.scale


class Unfollowable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDE, WIDE)
        self.table = self.inner.weight.detach().numpy().tolist()


def test_a_build_that_takes_weights_out_of_torch_is_done_at_once() -> None:
    torch.manual_seed(5)
    plain = Unfollowable()
    torch.manual_seed(5)
    model = build_deferred(Unfollowable)
    assert source_of(model) is None and not model.inner.weight.is_meta
    assert model.table == plain.table
