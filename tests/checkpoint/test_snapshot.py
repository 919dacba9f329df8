"""The copy of a state that training may overwrite at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from multi_gpu_training.checkpoint.file_layout import Layouts
from multi_gpu_training.checkpoint.snapshot import HostBuffer, HostCopy
from multi_gpu_training.checkpoint.state_buffers import DeviceBuffer, StateBuffers


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


def check_several(copy: Any, device: str) -> None:
    """Three states, copied one after the other before the first is read; then other shapes, types
    and layouts under the same names."""
    for size in (1000, 2000):
        states = [files(scale, size, device) for scale in (1.0, 2.0, 3.0)]
        odd = states[2]["b"]
        odd["image"] = odd["image"].contiguous().transpose(0, 3)[::2]  # neither order of channels
        if size == 2000:
            odd["half"] = odd["half"].double()
        expected = [
            {f: {k: t.cpu().clone() for k, t in ts.items()} for f, ts in state.items()}
            for state in states
        ]
        copies = []
        for state in states:
            copies.append(copy(state))
            for tensors in state.values():
                for tensor in tensors.values():
                    tensor.zero_()
        for got, wanted in zip(copies, expected, strict=True):
            for _ in range(2):  # a write that failed is tried again
                for file, tensors in wanted.items():
                    found = read(got, file)
                    assert {*found} == {*tensors}
                    for name, tensor in tensors.items():
                        assert found[name].dtype == tensor.dtype
                        assert torch.equal(found[name], tensor), name
            got.release()


def test_several_copies_wait_for_the_disk_each_as_it_was() -> None:
    device = torch.device("cpu")
    buffers = StateBuffers(device, several=True, wait=lambda: None)
    check_several(buffers.copy, "cpu")
    assert buffers.nbytes < 3 * 30_000  # three of them, again and again
    # As on a GPU: copied on the device, and brought to the host's only buffer when it is read.
    host, layouts = HostBuffer(), Layouts()
    check_several(lambda state: DeviceBuffer(device, host).copy_laid_out(*layouts.of(state)), "cpu")
    one = DeviceBuffer(device, host)
    for scale in (1.0, 2.0):
        state = files(scale, 50)
        large = state["a"]["large"].clone()
        assert torch.equal(read(one.copy_laid_out(*layouts.of(state)), "a")["large"], large)


@pytest.mark.gpu
def test_several_copies_on_the_gpu_wait_for_the_disk_each_as_it_was() -> None:
    buffers = StateBuffers(torch.device("cuda", 0), several=True, wait=lambda: None)
    check_several(buffers.copy, "cuda")
    state = files(1.0, 1_000_000, "cuda:0")
    torch.cuda._sleep(200_000_000)  # about 0.1 s of the GPU's time before the copy
    copy = buffers.copy(state)
    state["a"]["large"].zero_()
    expected = torch.arange(1_000_000, dtype=torch.float32)
    reader = ThreadPoolExecutor(1)  # as the thread that writes
    assert torch.equal(reader.submit(read, copy, "a").result()["large"], expected)
    assert copy.small and buffers.host.pinned and copy.device_s > 0
