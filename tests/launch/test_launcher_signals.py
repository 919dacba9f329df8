"""What counts as pressing Ctrl-C."""

from __future__ import annotations

import signal
import time

import pytest

from multi_gpu_training.launch.signals import ONE_PRESS_S, AskedToEnd, LauncherSignals


def test_a_ctrl_c_that_timeout_sends_twice_counts_once() -> None:
    with LauncherSignals() as signals:
        signals.listen()
        for _ in range(2):  # `timeout -s INT`: to its child, and to the group of both
            signal.raise_signal(signal.SIGINT)
        assert signals.interrupts == 1
        with pytest.raises(AskedToEnd):
            signals.check()
        time.sleep(ONE_PRESS_S * 1.5)
        signal.raise_signal(signal.SIGINT)
        assert signals.interrupts == 2
