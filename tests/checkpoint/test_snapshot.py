"""The copy of a state that training may overwrite at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from multi_gpu_training.checkpoint.snapshot import HostBuffer, HostCopy


def read(copy: HostCopy, file: str) -> dict[str, Tensor]:
    copy.wait()
    loaded: dict[str, Tensor] = load(b"".join(bytes(piece) for piece in copy.files[file]))
    return loaded


def address(copy: HostCopy, file: str) -> int:
    """Where the tensors of a file lie in host memory."""
    return int(np.frombuffer(copy.files[file][1], dtype=np.uint8).ctypes.data)


def files(scale: float, size: int, device: str = "cpu") -> dict[str, dict[str, Tensor]]:
    image = torch.randn(2, 3, 5, 7, device=device).to(memory_format=torch.channels_last)
    return {
        "a": {
            "flags": torch.tensor([True, False, True], device=device),
            "large": scale * torch.arange(size, dtype=torch.float32, device=device),
            "step": torch.tensor(scale),  # optimizers keep it on the host
        },
        "b": {"image": image, "half": torch.full((3,), scale, device=device).bfloat16()},
        "c": {},
    }


def check(device: str, size: int) -> None:
    buffer = HostBuffer(device)
    place = None
    for scale in (1.0, 2.0, 3.0):
        state = files(scale, size, device)
        expected = {f: {k: t.cpu().clone() for k, t in ts.items()} for f, ts in state.items()}
        copy = buffer.copy(state)
        for tensors in state.values():
            for tensor in tensors.values():
                tensor.zero_()  # as the next step would
        for file, tensors in expected.items():
            got = read(copy, file)
            assert set(got) == set(tensors)
            assert all(torch.equal(got[name], tensors[name]) for name in tensors)
        assert place in (None, address(copy, "a"))
        place = address(copy, "a")
        assert (buffer.allocated_s > 0) == (scale == 1.0)
    before = buffer.nbytes
    larger = files(4.0, 2 * size, device)
    expected_large = larger["a"]["large"].cpu()
    assert torch.equal(read(buffer.copy(larger), "a")["large"], expected_large)
    assert before < buffer.nbytes <= 2 * before


def test_a_copy_is_what_was_there_and_the_memory_is_reused() -> None:
    check("cpu", 10_000)


@pytest.mark.gpu
def test_a_copy_from_the_gpu_is_what_was_there_and_the_memory_is_reused() -> None:
    check("cuda", 10_000_000)


@pytest.mark.gpu
def test_the_host_goes_on_while_the_gpu_copies_into_pinned_memory() -> None:
    buffer = HostBuffer("cuda")
    state = files(1.0, 100_000_000, "cuda")
    buffer.copy(state).wait()
    assert buffer.pinned
    torch.cuda._sleep(200_000_000)  # about 0.1 s of the GPU's time before the copy
    copy = buffer.copy(state)
    [(_, end)] = copy.marks
    assert not end.query()
    copy.wait()
    assert copy.device_s > 0
