"""The forecast's timeline of a DDP step against real DDP on a network that takes the time it says.

    OMP_NUM_THREADS=1 python benchmarks/timeline.py --out benchmarks/timeline.md

Three models, three bucket sizes, two networks. Each case is DDP on one rank with a communication
hook. In every other step the hook only records when each bucket is ready; that is the profile. In
the others it returns a future that is done when the bucket has been sent: one channel, one
bucket after the other, each as long as the all-reduce table of the network says. Backward goes on
meanwhile, as with a real network. Two steps that follow each other make a pair: what
`forecast.timeline` makes of the one is compared with the other, and the case's error is that of the
median over the pairs, so that a machine that others slow down slows down both.

With `--device cuda` the channel is a side stream on which a kernel waits, and the clock is the
device's; with `--device cpu` it is a thread that sleeps. `--quick` tries the script.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from multi_gpu_training.planning.forecast import GradientBucket, Interconnect, named
from multi_gpu_training.planning.forecast.timeline import exchange, step_s

BUCKETS_MB = (1, 5, 25)
GPUS, NODES = 16, 2
NETWORKS = {
    "cpu": ("ethernet-10g", "ethernet-100g"),
    "cuda": ("ethernet-100g", "infiniband-4x100g"),
}


def mlp(width: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers)


def cnn(width: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU()]
    for depth in range(3):
        channels = width * 2**depth
        layers += [nn.Conv2d(channels, 2 * channels, 3, 2, 1), nn.ReLU()]
        layers += [nn.Conv2d(2 * channels, 2 * channels, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten())


def transformer(width: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


@dataclass(frozen=True)
class Model:
    build: Callable[[int], nn.Module]
    width: int
    shape: tuple[int, ...]


MODELS = {
    "cpu": {
        "mlp": Model(mlp, 1024, (64, 1024)),
        "cnn": Model(cnn, 64, (2, 3, 24, 24)),
        "transformer": Model(transformer, 320, (2, 32, 320)),
    },
    "cuda": {
        "mlp": Model(mlp, 4096, (2048, 4096)),
        "cnn": Model(cnn, 128, (128, 3, 64, 64)),
        "transformer": Model(transformer, 1536, (16, 512, 1536)),
    },
    "quick": {
        "mlp": Model(mlp, 256, (8, 256)),
        "cnn": Model(cnn, 8, (2, 3, 16, 16)),
        "transformer": Model(transformer, 64, (2, 8, 64)),
    },
}


class HostClock:
    """Marks and channel of a CPU: perf_counter, and a thread that sleeps."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[float, Any, Tensor] | None] = queue.SimpleQueue()
        self._free = 0.0
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def mark(self) -> float:
        return time.perf_counter()

    def between(self, first: float, second: float) -> float:
        return second - first

    def send(self, tensor: Tensor, seconds: float) -> Any:
        # By deadlines, so that a late wake-up delays one bucket and not all behind it.
        self._free = max(time.perf_counter(), self._free) + seconds
        future: Any = torch.futures.Future()
        self._waiting.put((self._free, future, tensor))
        return future

    def done(self, tensor: Tensor) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(tensor)
        return future

    def finish(self) -> None:
        pass

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join()

    def _send(self) -> None:
        while (item := self._waiting.get()) is not None:
            deadline, future, tensor = item
            time.sleep(max(0.0, deadline - time.perf_counter()))
            future.set_result(tensor)


class DeviceClock:
    """Marks and channel of a GPU: events, and a side stream on which a kernel spins."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._cycles_per_s = self._calibrate()
        self._sent: list[tuple[float, torch.cuda.Event, torch.cuda.Event]] = []

    def _calibrate(self) -> float:
        cycles = 50_000_000
        torch.cuda._sleep(cycles)  # the first one loads the kernel
        first, second = self._event(), self._event()
        first.record()
        torch.cuda._sleep(cycles)
        second.record()
        torch.cuda.synchronize()
        return cycles / self.between(first, second)

    def _event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)

    def mark(self) -> torch.cuda.Event:
        event = self._event()
        event.record()
        return event

    def between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        return first.elapsed_time(second) / 1000

    def send(self, tensor: Tensor, seconds: float) -> Any:
        self._stream.wait_stream(torch.cuda.current_stream())
        future: Any = torch.futures.Future(devices=[self._device])
        with torch.cuda.stream(self._stream):
            first = self.mark()
            torch.cuda._sleep(int(seconds * self._cycles_per_s))
            self._sent.append((seconds, first, self.mark()))
            future.set_result(tensor)  # done for those who wait when the side stream is there
        return future

    def done(self, tensor: Tensor) -> Any:
        future: Any = torch.futures.Future(devices=[self._device])
        future.set_result(tensor)
        return future

    def finish(self) -> None:
        torch.cuda.synchronize()
        if self._sent:
            # The kernel counts cycles, and the clock of a GPU changes with its load.
            asked = sum(seconds for seconds, _, _ in self._sent)
            took = sum(self.between(first, second) for _, first, second in self._sent)
            self._cycles_per_s *= asked / took
            self._sent.clear()

    def close(self) -> None:
        torch.cuda.synchronize()


@dataclass
class Hook:
    """DDP's communication hook: records, or sends."""

    clock: Any
    network: Interconnect
    sending: bool = False

    def __post_init__(self) -> None:
        self.seen: list[tuple[int, Any]] = []

    def exchange(self, bucket: dist.GradBucket) -> Any:
        tensor = bucket.buffer()
        size = tensor.numel() * tensor.element_size()
        if self.sending:
            return self.clock.send(tensor, self.network.allreduce_s(size, GPUS, NODES))
        self.seen.append((size, self.clock.mark()))
        return self.clock.done(tensor)


@dataclass(frozen=True)
class Step:
    forward_s: float
    backward_s: float
    optimizer_s: float
    ready: tuple[tuple[int, float], ...]

    @property
    def whole_s(self) -> float:
        return self.forward_s + self.backward_s + self.optimizer_s


@dataclass(frozen=True)
class Case:
    model: str
    bucket_mb: int
    network: str
    buckets: int
    gradient_mb: float
    alone_s: float
    communication_s: float
    exposed_s: float
    predicted_s: float
    measured_s: float
    # Medians over pairs of steps: predicted over measured, and the same for communication that
    # costs nothing and for communication that is not hidden at all.
    ratio: float
    free_ratio: float
    added_ratio: float

    @property
    def error(self) -> float:
        return abs(self.ratio - 1)


def one_step(net: nn.Module, batch: Tensor, optimizer: Any, hook: Hook) -> Step:
    clock = hook.clock
    hook.seen.clear()
    clock.finish()
    start = clock.mark()
    loss = net(batch).square().mean()
    forward = clock.mark()
    loss.backward()
    backward = clock.mark()
    optimizer.step()
    optimizer.zero_grad()
    end = clock.mark()
    clock.finish()
    return Step(
        clock.between(start, forward),
        clock.between(forward, backward),
        clock.between(backward, end),
        tuple((size, clock.between(forward, mark)) for size, mark in hook.seen),
    )


def run_case(name: str, model: Model, bucket_mb: int, network: str, options: Any) -> Case:
    device = options.device
    clock = HostClock() if device == "cpu" else DeviceClock()
    try:
        hook = Hook(clock, named(network))
        torch.manual_seed(0)
        inner = model.build(model.width).to(device)
        net = nn.parallel.DistributedDataParallel(
            inner, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True
        )
        # DDP refuses annotations that are strings, as all of this file are.
        net.register_comm_hook(None, lambda state, bucket: hook.exchange(bucket))
        batch = torch.randn(*model.shape, device=device)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-6, momentum=0.9)
        for number in range(options.warm):  # DDP makes its buckets anew after the first step
            hook.sending = number % 2 == 1
            one_step(net, batch, optimizer, hook)
        profile, sent = [], []
        for number in range(options.steps):
            for sending in (False, True) if number % 2 else (True, False):
                hook.sending = sending
                step = one_step(net, batch, optimizer, hook)
                if sending:
                    sent.append(step.whole_s)
                else:
                    profile.append(step)
    finally:
        clock.close()
    return compared(name, bucket_mb, network, profile, sent)


def compared(
    name: str, bucket_mb: int, network: str, profile: list[Step], sent: list[float]
) -> Case:
    """Each profiled step through the timeline, beside the step next to it on the network."""
    interconnect = named(network)
    lines = [
        exchange(
            [GradientBucket(size, at) for size, at in step.ready],
            step.backward_s,
            lambda size: interconnect.allreduce_s(size, GPUS, NODES),
        )
        for step in profile
    ]
    predicted = [
        step_s(step.forward_s, step.backward_s, step.optimizer_s, line.exposed_s)
        for step, line in zip(profile, lines, strict=True)
    ]
    return Case(
        name,
        bucket_mb,
        network,
        len(profile[0].ready),
        sum(size for size, _ in profile[0].ready) / 2**20,
        median(step.whole_s for step in profile),
        lines[0].communication_s,
        median(line.exposed_s for line in lines),
        median(predicted),
        median(sent),
        median(mine / theirs for mine, theirs in zip(predicted, sent, strict=True)),
        median(step.whole_s / theirs for step, theirs in zip(profile, sent, strict=True)),
        median(
            (step.whole_s + lines[0].communication_s) / theirs
            for step, theirs in zip(profile, sent, strict=True)
        ),
    )


def page(cases: list[Case], options: Any) -> str:
    machine = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    lines = [
        "# Timeline of a DDP step against an emulated network",
        "",
        f"    {options.command}",
        "",
        f"{machine}, {os.cpu_count()} cores, torch {torch.__version__}; medians of "
        f"{options.steps} steps with and without the network, in turns; the error is that of the "
        f"median ratio of neighbours. Load average before: {options.load:.1f}. The networks are "
        f"those of {GPUS} GPUs on {NODES} nodes.",
        "",
        "| model | bucket | network | buckets | gradients | step alone | communication | exposed "
        "| predicted | measured | error |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        lines.append(
            f"| {case.model} | {case.bucket_mb} MB | {case.network} | {case.buckets} "
            f"| {case.gradient_mb:.0f} MB | {case.alone_s * 1e3:.1f} ms "
            f"| {case.communication_s * 1e3:.1f} ms | {case.exposed_s * 1e3:.1f} ms "
            f"| {case.predicted_s * 1e3:.1f} ms | {case.measured_s * 1e3:.1f} ms "
            f"| {case.error:.1%} |"
        )
    errors = [case.error for case in cases]
    unaware = mean(abs(case.free_ratio - 1) for case in cases)
    unhidden = mean(abs(case.added_ratio - 1) for case in cases)
    lines += [
        "",
        f"Mean error of {len(cases)} cases: {mean(errors):.1%}, largest {max(errors):.1%}. "
        f"Taking communication for free: {unaware:.1%}; adding all of it: {unhidden:.1%}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, default=25, help="measured, with and without network")
    parser.add_argument("--warm", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="tiny models, three steps")
    parser.add_argument("--out", type=Path, help="the table, as Markdown; JSON goes beside it")
    options = parser.parse_args()
    options.command = "python benchmarks/timeline.py"
    if options.device == "cpu":
        options.command = f"OMP_NUM_THREADS={torch.get_num_threads()} {options.command}"
    else:
        options.command += f" --device {options.device}"
    if options.steps != parser.get_default("steps"):
        options.command += f" --steps {options.steps}"
    options.load = os.getloadavg()[0]
    if options.quick:
        options.steps = 3
    models = MODELS["quick" if options.quick else options.device]
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            cases = [
                run_case(name, model, bucket_mb, network, options)
                for name, model in models.items()
                for bucket_mb in BUCKETS_MB
                for network in NETWORKS[options.device]
            ]
        finally:
            dist.destroy_process_group()
    text = page(cases, options)
    print(text)
    if options.out:
        options.out.write_text(text)
        rows = [{**asdict(case), "error": case.error} for case in cases]
        options.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
