"""Which nodes take part, decided without any network or process."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.launch.elastic.membership import (
    LAST_CALL_S,
    LOST_S,
    Membership,
    Node,
    parse_node,
)
from multi_gpu_training.launch.engine import Hosts


def node(rank: int, start: int = 0) -> Node:
    return Node(f"{rank}-{start}", rank, f"10.0.0.{rank + 1}", 29500, ranks=2)


def members(least: int = 1, most: int = 2) -> Membership:
    found = Membership(least, most, "0-0", now=0.0)
    found.hear(node(0), 0.0)
    return found


def training(members: Membership, *ranks: int, now: float = 0.0) -> list[Node]:
    """A round with these nodes in it."""
    found = [node(rank) for rank in ranks]
    for one in found:
        members.hear(one, now)
    members.open(found)
    found = [replace(one, phase="training", round=members.number) for one in found]
    for one in found:
        members.hear(one, now)
    return found


def test_a_run_waits_for_all_its_nodes_but_not_for_ever() -> None:
    found = members()
    assert found.ready(1.0) is None
    assert found.ready(LAST_CALL_S + 0.1) == [node(0)]
    found.hear(node(1), 1.0)
    assert found.ready(1.0) == [node(0), node(1)]


def test_a_run_does_not_begin_with_fewer_nodes_than_it_needs() -> None:
    found = members(least=2)
    assert found.ready(10**6) is None


def test_the_leader_comes_first_whatever_its_number() -> None:
    found = Membership(1, 3, "2-0", 0.0)
    for rank in (1, 0, 2):
        found.hear(node(rank), 0.0)
    assert [one.node_rank for one in found.ready(0.0) or []] == [2, 0, 1]


def test_a_silent_node_is_lost_and_the_rest_go_on_at_once() -> None:
    found = members()
    first, second = training(found, 0, 1)
    found.forget_silent(LOST_S - 0.1)
    assert found.broken() is None
    found.forget_silent(LOST_S + 0.1)
    assert "node 1 (10.0.0.2) was silent for 10 s" in str(found.broken())
    assert found.ready(11.0) is None  # the leader's own ranks have to end first
    found.hear(replace(first, phase="waiting"), 11.0)
    assert [one.name for one in found.ready(11.0) or []] == [first.name]
    # Its ranks must not be counted on, though it was heard of again.
    found.hear(second, 11.0)
    assert [one.name for one in found.ready(11.0) or []] == [first.name]


def test_a_node_that_is_back_joins() -> None:
    found = members()
    training(found, 0)
    assert found.broken() is None
    found.hear(node(1), 5.0)
    assert found.broken() == "node 1 (10.0.0.2) joins"


def test_a_node_beyond_the_most_is_not_a_reason_to_begin_anew() -> None:
    found = members()
    training(found, 0, 1)
    found.hear(node(2), 5.0)
    assert found.broken() is None


def test_a_node_that_was_started_anew_is_not_the_one_that_was_there() -> None:
    found = members()
    training(found, 0, 1)
    found.hear(node(1, start=1), 0.5)
    assert "was started anew" in str(found.broken())


def test_a_node_whose_ranks_failed_takes_the_others_along() -> None:
    found = members()
    first, second = training(found, 0, 1)
    found.hear(replace(second, phase="waiting"), 1.0)
    assert "node 1" in str(found.broken())
    assert found.ready(1.0) is None
    found.hear(replace(first, phase="waiting"), 1.0)
    assert len(found.ready(1.0) or []) == 2


def test_a_run_has_ended_when_every_node_that_is_there_has() -> None:
    found = members()
    first, second = training(found, 0, 1)
    found.hear(replace(first, phase="done"), 1.0)
    assert not found.finished()
    found.hear(replace(second, phase="done"), 1.0)
    assert found.finished() and found.broken() is None


@pytest.mark.parametrize(
    "values",
    [
        {"ranks": "2"},
        {"name": 3},
        {"name": "../x"},
        {"port": None},
        {"port": 10**30},
        {"round": -1},
        {"phase": "asleep"},
    ],
    ids=str,
)
def test_what_a_stranger_says_is_checked(values: dict[str, object]) -> None:
    assert parse_node(asdict(node(0))) == node(0)
    with pytest.raises(ValueError):
        parse_node({**asdict(node(0)), **values})


def test_nnodes_is_a_number_or_a_range() -> None:
    hosts = Hosts.from_environment(nodes="1:2", master_addr="10.0.0.1")
    assert (hosts.least, hosts.nodes, hosts.elastic) == (1, 2, True)
    hosts = Hosts.from_environment(nodes="2", master_addr="10.0.0.1")
    assert (hosts.least, hosts.nodes, hosts.elastic) == (2, 2, False)
    for text in ("two", "1:", ":2", "1:2:3", "-1", "3:2", "0:2"):
        with pytest.raises(ConfigError, match="LEAST:MOST"):
            Hosts.from_environment(nodes=text, master_addr="10.0.0.1")
