"""`python -m ...copies`: copies between host and GPUs, and between all pairs of GPUs.

Reads what to copy from its first line of input, writes a JSON line for each copy. A broken link
can hang a copy for ever: whoever started this kills it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from itertools import permutations
from typing import Any

from multi_gpu_training.distributed.cleanup import die_with_parent
from multi_gpu_training.distributed.trial import Voice

REPEATS = 5


def copy_all(request: dict[str, Any], voice: Voice) -> None:
    import torch

    count = request["bytes"] // 4
    gpus = request["gpus"]
    sent = torch.arange(count, dtype=torch.int32)
    voice.say(stage="host", at="host memory")
    pinned = sent.pin_memory()
    back = torch.empty_like(pinned).pin_memory()
    for gpu in gpus:
        voice.say(stage="copy", at=f"host - GPU {gpu}")
        there = torch.empty(count, dtype=torch.int32, device=f"cuda:{gpu}")
        forth = _seconds(gpu, partial(there.copy_, pinned, non_blocking=True))
        home = _seconds(gpu, partial(back.copy_, there, non_blocking=True))
        voice.say(
            host=gpu,
            to_gbps=request["bytes"] / forth / 1e9,
            from_gbps=request["bytes"] / home / 1e9,
            right=bool((back == sent).all()),
        )
        back.zero_()
        del there
    for one, other in permutations(gpus, 2):
        voice.say(stage="copy", at=f"GPU {one} - GPU {other}")
        source = pinned.to(f"cuda:{one}")
        target = torch.zeros(count, dtype=torch.int32, device=f"cuda:{other}")
        seconds = _seconds(one, partial(target.copy_, source, non_blocking=True), other)
        wanted = torch.arange(count, dtype=torch.int32, device=f"cuda:{other}")
        voice.say(
            pair=[one, other],
            gbps=request["bytes"] / seconds / 1e9,
            direct=bool(torch.cuda.can_device_access_peer(one, other)),
            right=bool((target == wanted).all()),
        )
        del source, target, wanted
    voice.say(stage="end")


def _seconds(gpu: int, copy: Callable[[], Any], other: int | None = None) -> float:
    """The fastest of some copies; others on the machine may slow one down, never speed it up."""
    import torch

    def settle() -> None:
        for index in (gpu, other):
            if index is not None:
                torch.cuda.synchronize(index)

    copy()
    best = float("inf")
    for _ in range(REPEATS):
        settle()
        begun = time.perf_counter()
        copy()
        settle()
        best = min(best, time.perf_counter() - begun)
    return best


def main() -> None:
    die_with_parent()
    voice = Voice()
    request = json.loads(sys.stdin.readline())
    voice.say(stage="start", at="CUDA's start")
    code = 0
    try:
        copy_all(request, voice)
    except Exception as error:
        voice.say(error="".join(traceback.format_exception_only(error)).strip())
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
