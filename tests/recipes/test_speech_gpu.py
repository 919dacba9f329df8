"""On a GPU the recogniser's step waits for nothing, and can be captured as one graph."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from multi_gpu_training.recipes.speech.ctc import ctc_loss
from multi_gpu_training.recipes.speech.dataset import Batch
from multi_gpu_training.recipes.speech.features import DRAWS
from multi_gpu_training.recipes.speech.lmu import DelayMemory
from multi_gpu_training.recipes.speech.objective import Objective
from multi_gpu_training.recipes.speech.speech_model import SIZES, Recogniser

pytestmark = pytest.mark.gpu


def batch(device: str) -> Batch:
    generator = torch.Generator().manual_seed(0)
    sound = (3000 * torch.randn(4, 16000, generator=generator)).to(torch.int16)
    targets = torch.randint(1, 29, (4, 9), generator=generator)
    made = Batch(
        sound,
        torch.tensor([16000, 12000, 9000, 16000]),
        targets,
        torch.tensor([9, 5, 4, 8]),
        torch.rand(4, DRAWS, generator=generator),
        0.9 + 0.2 * torch.rand(4, 2, generator=generator),
        torch.zeros(4, dtype=torch.int64),
    )
    return Batch(*(t.to(device) for t in made))


@pytest.fixture
def loud_about_waiting() -> Iterator[None]:
    """Everything that makes the host wait for the device raises, once this is switched on."""
    yield
    torch.cuda.set_sync_debug_mode("default")


def recogniser() -> Recogniser:
    torch.manual_seed(0)
    return Recogniser(SIZES["small"], 29, 8000).cuda()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_step_does_not_wait_for_the_device(loud_about_waiting: None) -> None:
    model, objective, data = recogniser(), Objective(augment=True), batch("cuda")
    objective(model, data)[0].backward()  # what is kept for each length is made here
    torch.cuda.set_sync_debug_mode("error")
    objective(model, data)[0].backward()


def test_a_captured_step_computes_what_an_eager_one_computes() -> None:
    model, objective, data = recogniser(), Objective(augment=True), batch("cuda")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            objective(model, data)[0].backward()
    torch.cuda.current_stream().wait_stream(side)
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        objective(model, data)[0].backward()
    graph.replay()
    torch.cuda.synchronize()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    for ours, reference in zip(found, expected, strict=True):
        assert float((ours - reference).norm()) <= 1e-4 * max(float(reference.norm()), 1e-6)


def test_the_gpu_computes_what_the_cpu_computes() -> None:
    memory, inputs = DelayMemory(256, 1000.0), torch.randn(1, 1000, 2)
    reference = memory.recurrent(inputs.double())
    assert float((memory(inputs.cuda()).cpu() - reference).abs().max()) <= 1e-5
    data = batch("cpu")
    logits = torch.randn(4, 100, 29)
    lengths = torch.tensor([100, 80, 60, 99])
    cpu = ctc_loss(logits, lengths, data.targets, data.sizes)
    gpu = ctc_loss(logits.cuda(), lengths.cuda(), data.targets.cuda(), data.sizes.cuda())
    assert torch.allclose(gpu.cpu(), cpu, rtol=1e-5)
