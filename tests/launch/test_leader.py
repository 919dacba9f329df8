"""Which nodes take part, decided without any network or process."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.launch.elastic.membership import (
    CLAIM_S,
    LAST_CALL_S,
    LOST_S,
    Membership,
    Node,
    parse_node,
)
from multi_gpu_training.launch.elastic.quorum import LEASE_S, Quorum
from multi_gpu_training.launch.engine import Hosts


def node(rank: int, start: int = 0) -> Node:
    return Node(f"{rank}-{start}", rank, f"10.0.0.{rank + 1}", 29500, ranks=2)


def members(least: int = 1, most: int = 2, **quorum: Any) -> Membership:
    found = Membership(least, Quorum(most, **quorum), node(0), now=0.0)
    found.hear(node(0), 0.0)
    return found


def training(members: Membership, *ranks: int, now: float = 0.0) -> list[Node]:
    """A round with these nodes in it."""
    found = [node(rank) for rank in ranks]
    confirmed(members, *found, now=now)
    members.open(found)
    found = [replace(one, phase="training", round=members.number) for one in found]
    confirmed(members, *found, now=now)
    return found


def confirmed(members: Membership, *nodes: Node, now: float, fresh: bool = False) -> None:
    """These nodes tell about themselves, and that they keep to the leader."""
    for one in nodes:
        members.hear(one, now)
        members.confirm(one.name, now, fresh)


def test_a_run_waits_for_all_its_nodes_but_not_for_ever() -> None:
    found = members(most=3)
    confirmed(found, node(1), now=1.0)
    assert found.ready(1.0) is None
    late = LAST_CALL_S + 0.1
    confirmed(found, node(1), now=late)
    assert found.ready(late) == [node(0), node(1)]
    confirmed(found, node(2), now=late)
    assert found.ready(late) == [node(0), node(1), node(2)]


def test_a_run_does_not_begin_with_fewer_nodes_than_it_needs() -> None:
    found = members(least=2)
    assert found.ready(10**6) is None


@pytest.mark.parametrize(
    ("most", "here", "left", "held", "quorum", "may"),
    [
        (2, {1}, set(), False, {}, False),
        (2, {1}, {0}, False, {}, True),  # the other said that it leaves
        (3, {2}, {0}, False, {}, False),
        (3, {2}, {0, 1}, False, {}, False),  # those two may be started anew, and be a majority
        (3, {1, 2}, set(), False, {}, True),
        (4, {0, 1}, set(), False, {}, False),
        (4, {2, 3}, {0, 1}, False, {}, True),
        (2, {1}, set(), True, {"witness": "w:1"}, True),
        (3, {0, 1}, set(), False, {"witness": "w:1"}, False),  # the third may have the witness
        (3, {0, 1, 2}, set(), False, {"witness": "w:1"}, True),
        (3, {2}, set(), False, {"allow_minority": True}, True),
    ],
)
def test_a_part_trains_only_with_a_majority_or_the_witness(
    most: int, here: set[int], left: set[int], held: bool, quorum: dict[str, Any], may: bool
) -> None:
    rule = Quorum(most, **quorum)
    assert rule.enough(here, left, held) is may
    rest = set(range(most)) - here
    if may and not rule.allow_minority and not left:
        assert not rule.enough(rest, set(), False)  # what is left of the run may not train
    confirmed_at = rule.confirmed_at(dict.fromkeys(here, 5.0), left, 5.0 if held else None)
    assert (confirmed_at == 5.0) is may


def test_a_leader_may_train_as_long_as_its_newest_majority_keeps_to_it() -> None:
    found = members(most=3)
    training(found, 0, 1, 2, now=0.0)
    confirmed(found, node(1), now=2.0)
    assert found.lease_until(4.0) == 2.0 + LEASE_S  # node 2 was last heard at 0
    # A node that was just started may have given its word to another leader before.
    other = members(most=3)
    confirmed(other, node(1), now=2.0, fresh=True)
    assert other.lease_until(4.0) == 0.0
    confirmed(other, node(2), now=3.0, fresh=True)
    assert other.lease_until(4.0) == 2.0 + LEASE_S  # but now nobody is left who could lead


def test_the_leader_comes_first_whatever_its_number() -> None:
    found = Membership(1, Quorum(3), node(2), 0.0)
    confirmed(found, *(node(rank) for rank in (1, 0, 2)), now=0.0)
    assert [one.node_rank for one in found.ready(0.0) or []] == [2, 0, 1]


def test_a_silent_node_is_lost_and_a_majority_goes_on_at_once() -> None:
    found = members(most=3)
    first, second, third = training(found, 0, 1, 2)
    found.forget_silent(LOST_S - 0.1)
    assert found.losses == []
    confirmed(found, second, now=LOST_S)
    found.forget_silent(LOST_S + 0.1)
    assert found.broken(LOST_S + 0.1) == "node 2 (10.0.0.3) was silent for 10 s"
    assert found.ready(11.0) is None  # the ranks of the others have to end first
    for one in (first, second):
        confirmed(found, replace(one, phase="waiting"), now=11.0)
    assert [one.name for one in found.ready(11.0) or []] == [first.name, second.name]
    # Its ranks must not be counted on, though it was heard of again.
    found.hear(third, 11.0)
    assert [one.name for one in found.ready(11.0) or []] == [first.name, second.name]


def test_one_of_two_stops_and_does_not_begin_again() -> None:
    found = members()
    first, second = training(found, 0, 1)
    found.lose(second.name, "ended")
    found.hear(replace(first, phase="waiting"), 100.0)
    assert found.ready(100.0) is None
    returned = node(1, start=1)
    confirmed(found, returned, now=100.0, fresh=True)
    assert [one.name for one in found.ready(100.0) or []] == [first.name, returned.name]


def test_a_round_that_lost_its_witness_is_broken() -> None:
    found = members(witness="w:1")
    found.witness_at = 0.0
    training(found, 0)
    found.witness_at = 20.0
    assert found.broken(20.0 + LEASE_S) is None
    assert "the witness w:1 does not confirm" in str(found.broken(20.0 + LOST_S + 0.1))


def test_a_node_that_is_back_joins() -> None:
    found = members()
    found.left.add(1)
    training(found, 0, now=5.0)
    assert found.broken(5.0) is None
    found.hear(node(1), 5.0)
    assert found.broken(5.0) == "node 1 (10.0.0.2) joins"


def test_a_node_beyond_the_most_is_not_a_reason_to_begin_anew() -> None:
    found = members()
    training(found, 0, 1)
    found.hear(node(2), 5.0)
    assert found.broken(5.0) is None


def test_a_node_that_was_started_anew_is_not_the_one_that_was_there() -> None:
    found = members()
    training(found, 0, 1)
    found.hear(node(1, start=1), 0.5)
    assert "was started anew" in str(found.broken(5.0))


def test_two_machines_with_one_number_do_not_take_turns() -> None:
    found = members(most=3)
    first, second = node(1), node(1, start=1)
    found.hear(first, 0.0)
    assert found.claim(first, 0.5) is None
    assert found.claim(second, 0.6) is second  # whether the first one lives is not known yet
    found.hear(first, 1.0)
    assert found.claim(second, 1.1) == first
    assert found.claim(node(0, start=1), 1.2) == node(0)  # whoever leads is there
    # One that fell silent has lost its place, and does not get it back from the second.
    third = node(1, start=2)
    assert found.claim(third, 2.0) is third
    assert found.claim(third, 2.0 + CLAIM_S) is None
    found.hear(third, 2.0 + CLAIM_S)
    assert found.claim(first, 5.0) == third
    found.leave(first)
    assert found.left == set() and third.name in found.nodes


def test_a_node_whose_ranks_failed_takes_the_others_along() -> None:
    found = members()
    first, second = training(found, 0, 1)
    found.hear(replace(second, phase="waiting"), 1.0)
    assert "node 1" in str(found.broken(5.0))
    assert found.ready(1.0) is None
    found.hear(replace(first, phase="waiting"), 1.0)
    assert len(found.ready(1.0) or []) == 2


def test_a_run_has_ended_when_every_node_that_is_there_has() -> None:
    found = members()
    first, second = training(found, 0, 1)
    found.hear(replace(first, phase="done"), 1.0)
    assert not found.finished()
    found.hear(replace(second, phase="done"), 1.0)
    assert found.finished() and found.broken(5.0) is None


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
