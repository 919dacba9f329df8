"""When a failed run is started again, decided without any process."""

from __future__ import annotations

import pytest

from multi_gpu_training import MultiGPUConfig
from multi_gpu_training.launch.restart_policy import (
    Fault,
    Limits,
    NodeLosses,
    RestartPolicy,
    back_off,
)

KILLED = "SIGKILL"


def killed(step: int, rank: int = 1) -> Fault:
    return Fault(rank, KILLED, step, begun=True)


def test_restarts_are_counted_within_the_window_alone() -> None:
    policy = RestartPolicy(Limits(2, window_s=100.0))
    assert [policy.judge(killed(n), n * 10.0).restart for n in range(3)] == [True, True, False]
    policy = RestartPolicy(Limits(2, window_s=100.0))
    # One fault a minute, for ever: never more than two within 100 s.
    assert all(policy.judge(killed(n), n * 60.0).restart for n in range(50))


def test_a_run_that_is_given_up_says_which_limit_it_met() -> None:
    policy = RestartPolicy(Limits(1, window_s=100.0))
    policy.judge(killed(3), 0.0)
    said = policy.judge(killed(5), 1.0).reason
    assert "max_restarts=1 is used up" in said and "restart_window_s=100" in said
    assert "rank 1, at step 5, with SIGKILL" in said


def test_restarts_back_off_and_begin_anew_after_a_quiet_window() -> None:
    assert [back_off(n) for n in range(7)] == [0, 1, 2, 4, 8, 16, 30]
    assert back_off(10**6) == 30
    policy = RestartPolicy(Limits(9, window_s=100.0))
    assert [policy.judge(killed(n), float(n)).pause_s for n in range(4)] == [0, 1, 2, 4]
    assert policy.judge(killed(9), 1000.0).pause_s == 0


def test_the_same_fault_at_the_same_step_three_times_stops_with_a_diagnosis() -> None:
    policy = RestartPolicy(Limits(99, window_s=3600.0))
    fault = Fault(1, "ValueError: bad sample", 120, begun=True)
    verdicts = [policy.judge(fault, float(n)) for n in range(3)]
    assert [v.restart for v in verdicts] == [True, True, False]
    assert "rank 1 failed three times at step 120 with ValueError: bad sample" in verdicts[2].reason


@pytest.mark.parametrize(
    "other",
    [killed(121), Fault(1, "SIGSEGV", 120, begun=True), Fault(1, "ValueError: x", 120, begun=True)],
    ids=["step", "signal", "error"],
)
def test_another_fault_in_between_is_no_pattern(other: Fault) -> None:
    policy = RestartPolicy(Limits(99, window_s=3600.0))
    faults = [killed(120), killed(120), other, killed(120), killed(120)]
    assert all(policy.judge(fault, float(n)).restart for n, fault in enumerate(faults))


def test_the_same_fault_is_known_by_any_rank_and_any_process_number() -> None:
    policy = RestartPolicy(Limits(99, window_s=3600.0))
    texts = [f"RuntimeError: DataLoader worker (pid {pid}) was killed" for pid in (10, 11, 12)]
    faults = [Fault(n % 2, text, 7, begun=True) for n, text in enumerate(texts)]
    verdicts = [policy.judge(fault, float(n)) for n, fault in enumerate(faults)]
    assert "ranks 0 and 1 failed three times at step 7" in verdicts[2].reason


def test_a_rank_that_never_comes_to_a_step_is_not_started_for_ever() -> None:
    policy = RestartPolicy(Limits(99, window_s=3600.0))
    verdicts = [policy.judge(Fault(0, KILLED), float(n)) for n in range(3)]
    assert "three times before its first step with SIGKILL" in verdicts[2].reason


def test_lost_nodes_are_excused_only_while_the_run_gets_further() -> None:
    losses = NodeLosses()
    assert [losses.excused(step) for step in (None, 5, 9)] == [True] * 3
    # A training that brings down every node at the same step would be restarted for ever.
    assert [losses.excused(step) for step in (9, 7)] == [False] * 2
    assert losses.excused(None) and losses.excused(10)


def test_what_no_restart_can_mend_is_not_restarted() -> None:
    policy = RestartPolicy(Limits(99, window_s=3600.0))
    fault = Fault(0, "DataError: no samples", 1, begun=True, hopeless=True)
    assert not policy.judge(fault, 0.0).restart


def test_nothing_is_restarted_before_a_config_was_seen() -> None:
    policy = RestartPolicy(None)
    assert not policy.judge(killed(1), 0.0).restart
    policy.limits = Limits(1, 10.0)
    assert policy.judge(killed(1), 0.0).restart


def test_by_default_runs_that_keep_checkpoints_are_restarted() -> None:
    assert MultiGPUConfig().allowed_restarts == 3
    # Without checkpoints it would begin anew, unless that was asked for.
    assert MultiGPUConfig(enable_fault_tolerance=False).allowed_restarts == 0
    asked = MultiGPUConfig(enable_fault_tolerance=False, max_restarts=2, restart_window_s=60)
    assert asked.allowed_restarts == 2
