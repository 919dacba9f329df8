"""Launchers that talk to each other on loopback: no rank is started."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from multi_gpu_training.distributed.sockets import listening_socket
from multi_gpu_training.distributed.store_relay import HostedStore
from multi_gpu_training.errors import ConfigError
from multi_gpu_training.launch.elastic import (
    election,
    leader,
    membership,
    messages,
    rendezvous,
    witness,
)
from multi_gpu_training.launch.elastic.messages import Gone, MessageServer, ask
from multi_gpu_training.launch.elastic.quorum import Quorum
from multi_gpu_training.launch.elastic.rendezvous import Ended, NotMet, Rendezvous
from multi_gpu_training.launch.restart_policy import Fault, Limits

HERE = "127.0.0.1"
KEY = b"the token of these tests" * 2
LONGEST_S = 30.0


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind((HERE, 0))
        return int(probe.getsockname()[1])


@contextmanager
def node(
    rank: int, port: int, least: int = 1, most: int = 2, more: tuple[Any, ...] = ()
) -> Iterator[Rendezvous]:
    found = Rendezvous(least, most, rank, 1, (HERE, port), HERE, LONGEST_S, KEY, *more)
    try:
        yield found
    finally:
        found.shutdown()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """What each call gives, made at the same time."""
    answers: list[Any] = [None] * len(calls)

    def make(number: int) -> None:
        try:
            answers[number] = calls[number]()
        except BaseException as error:
            answers[number] = error

    threads = [threading.Thread(target=make, args=(n,)) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONGEST_S)
    return answers


def until(happened: Callable[[], Any]) -> None:
    deadline = time.monotonic() + LONGEST_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def pair() -> Iterator[tuple[Rendezvous, Rendezvous]]:
    port = free_port()
    with node(0, port) as first, node(1, port) as second:
        met = together(first.next_round, second.next_round)
        assert met == [(0, 2), (1, 2)], met
        yield first, second


def test_ranks_are_counted_through_and_told_where_to_meet(
    pair: tuple[Rendezvous, Rendezvous],
) -> None:
    first, second = pair
    assert (first.first_rank, second.first_rank, second.world) == (0, 1, 2)
    assert first.round.full_world == second.round.full_world == 2
    assert first.round.run == second.round.run
    assert first.attempt == second.attempt == 0


def test_nodes_with_different_numbers_of_ranks_count_those_that_are_there() -> None:
    port = free_port()
    nodes = [
        Rendezvous(2, 2, rank, ranks, (HERE, port), HERE, LONGEST_S, KEY)
        for rank, ranks in enumerate((2, 1))
    ]
    try:
        together(*(one.next_round for one in nodes))
        # batch_size x full_world is the global batch.
        assert [(one.world, one.round.full_world) for one in nodes] == [(3, 3), (3, 3)]
    finally:
        together(*(one.shutdown for one in nodes))


def test_the_others_go_on_when_a_node_ends(pair: tuple[Rendezvous, Rendezvous]) -> None:
    first, second = pair
    second.shutdown()
    until(first.why_again)
    assert first.next_round() == (0, 1)
    assert first.attempt == 1


@pytest.mark.usefixtures("soon")
def test_when_the_leader_ends_the_next_node_leads_and_takes_it_back() -> None:
    port = free_port()
    with ExitStack() as closing_all:
        second = None
        with node(0, port) as first:
            second = closing_all.enter_context(node(1, port))
            together(first.next_round, second.next_round)
            run = first.round.run
        until(second.why_again)
        assert second.next_round() == (0, 1)
        # Started again with the same words as before, it joins instead of beginning anew.
        returned = closing_all.enter_context(node(0, port))
        meeting = []
        thread = threading.Thread(target=lambda: meeting.append(returned.next_round()))
        thread.start()
        until(second.why_again)
        assert second.next_round() == (0, 2)
        thread.join(LONGEST_S)
        assert meeting == [(1, 2)] and returned.round.run == run
        assert returned.attempt == second.attempt == 2
        time.sleep(rendezvous.LOST_S + 0.5)
        assert second.why_again() is None, "the node that is back confirms its leader"


def test_the_leader_decides_for_all_whether_a_fault_is_followed_by_a_restart(
    pair: tuple[Rendezvous, Rendezvous],
) -> None:
    first, second = pair
    limits = Limits(1, 60.0)
    killed = Fault(1, "SIGKILL", 7, begun=True)
    assert second.judge(killed, limits).restart
    # The other node's ranks only lost contact: it learns why, and nothing more is counted.
    assert "SIGKILL" in str(first.fault_elsewhere())
    together(first.next_round, second.next_round)
    verdict = first.judge(Fault(0, "SIGKILL", 9, begun=True), limits)
    assert not verdict.restart and "max_restarts=1 is used up" in verdict.reason


def test_a_node_that_gives_up_ends_the_run_everywhere(pair: tuple[Rendezvous, Rendezvous]) -> None:
    first, second = pair
    second.end(2, "sample 7 has no label")
    until(first.why_again)
    with pytest.raises(Ended, match=r"node 1 .* ended the run:\nsample 7 has no label") as caught:
        first.next_round()
    assert caught.value.exit_code == 2


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes lose patience with each other five times sooner."""
    for module in (membership, rendezvous, election, witness):
        for name in ("LOST_S", "LEASE_S", "PROMISE_S", "VOTE_S", "RETRY_S"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(module, name) / 5)


@contextmanager
def firewall(*blocked: Rendezvous, error: type[OSError]) -> Iterator[None]:
    """Nobody reaches these launchers: a REJECT says the same as a port where nobody listens."""
    usual, ports = messages.Channel, {one.me.port for one in blocked}

    def connect(address: str, port: int, *rest: Any) -> Any:
        if port in ports:
            raise error("as the firewall says")
        return usual(address, port, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "Channel", connect)
        yield


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("error", [ConnectionRefusedError, TimeoutError])
def test_one_of_two_nodes_does_not_replace_a_leader_it_cannot_reach(
    pair: tuple[Rendezvous, Rendezvous], error: type[OSError]
) -> None:
    first, second = pair
    first.timeout_s = second.timeout_s = 2.5
    with firewall(first, error=error):
        until(second.why_again)
        until(first.why_again)
        met = together(first.next_round, second.next_round)
    assert [type(found) for found in met] == [NotMet, NotMet], met
    assert all("1 of 2 nodes are here" in str(found) for found in met)
    assert second.round.number == 1 and second.round.leader.name == first.me.name


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("successors", [16, 2], ids=["all-know-all", "two-know-all"])
def test_two_of_three_nodes_replace_a_leader_that_then_joins_them(
    successors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "SUCCESSORS", successors)
    port = free_port()
    with node(0, port, 1, 3) as first, node(1, port, 1, 3) as second, node(2, port, 1, 3) as third:
        nodes = (first, second, third)
        assert together(*(one.next_round for one in nodes)) == [(0, 3), (1, 3), (2, 3)]
        with firewall(first, error=ConnectionRefusedError):
            until(second.why_again)
            until(third.why_again)
            assert together(second.next_round, third.next_round) == [(0, 2), (1, 2)]
            assert first.round.number == 1  # it leads no further round
            until(first.why_again)
        until(lambda: first.round.leader.name == second.me.name)
        joining = threading.Thread(target=first.next_round)
        joining.start()
        until(second.why_again)
        until(third.why_again)
        assert together(second.next_round, third.next_round) == [(0, 3), (2, 3)]
        joining.join(LONGEST_S)
        assert [one.round.number for one in nodes] == [3, 3, 3]
        assert [one.first_rank for one in nodes] == [1, 0, 2]
        assert {one.world for one in nodes} == {3}


@pytest.mark.usefixtures("soon")
def test_a_witness_lets_one_of_two_nodes_go_on_and_not_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = witness.WitnessServer(HERE, 0, KEY)
    place = f"{HERE}:{server.port}"
    quorum = Quorum(2, place)
    port = free_port()
    more = [(witness.find_witness(place, "this run", KEY), quorum) for _ in range(2)]
    with node(0, port, more=more[0]) as first, node(1, port, more=more[1]) as second:
        assert together(first.next_round, second.next_round) == [(0, 2), (1, 2)]
        first.timeout_s = second.timeout_s = 3.0
        with firewall(first, error=TimeoutError):
            until(first.why_again)
            until(second.why_again)
            alone, refused = together(first.next_round, second.next_round)
            assert alone == (0, 1), alone
            assert isinstance(refused, NotMet) and place in str(refused)
            server.close()
            until(first.why_again)  # without its witness it stops, too
    monkeypatch.setattr(membership, "LAST_CALL_S", 0.5)
    with node(0, port, more=(None, Quorum(2, allow_minority=True))) as other:
        assert other.next_round() == (0, 1)


def test_nodes_with_another_witness_are_told() -> None:
    port = free_port()
    told = pytest.raises(ConfigError, match="--witness None here, but a:1 on node 0")
    with node(0, port, more=(None, Quorum(2, "a:1"))), node(1, port) as second, told:
        second.next_round()


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("kind", ["server", "file"])
def test_a_witness_keeps_to_one_leader_until_it_lets_go_or_falls_silent(
    kind: str, tmp_path: Path
) -> None:
    with ExitStack() as closing_all:
        place = str(tmp_path / "lock")
        if kind == "server":
            server = witness.WitnessServer(HERE, 0, KEY)
            closing_all.callback(server.close)
            place = f"{HERE}:{server.port}"
            time.sleep(witness.PROMISE_S)  # what it promised before it was started is over
        one, other = (witness.find_witness(place, "this run", KEY) for _ in range(2))
        assert one.hold("0-a", False)
        assert not other.hold("1-b", False) and one.hold("0-a", True)
        one.release("0-a")
        silent_since = time.monotonic()
        assert other.hold("1-b", False)
        assert not one.hold("0-a", False)
        until(lambda: one.hold("0-a", False))
        assert time.monotonic() - silent_since >= witness.PROMISE_S
        # It was away, and must not go on as if it held it still.
        assert not other.hold("1-b", True) and one.hold("0-a", True)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("10.0.0.1:70000", "70000 is not a valid port"),
        ("s3://bucket/lock", "give HOST:PORT"),
        ("host", "give HOST:PORT"),
        ("/nowhere/lock", "there is no folder /nowhere"),
    ],
)
def test_a_witness_that_cannot_be_is_refused_before_the_start(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        witness.find_witness(text, "this run", KEY)


def test_nodes_that_were_started_differently_are_told() -> None:
    port = free_port()
    told = pytest.raises(ConfigError, match="--nnodes 2:2 here, but 1:2")
    with node(0, port, 1, 2), node(1, port, 2, 2) as second, told:
        second.next_round()


def test_a_second_launcher_with_the_same_number_is_refused_and_the_first_trains_on(
    pair: tuple[Rendezvous, Rendezvous],
) -> None:
    first, second = pair
    with (
        node(1, first.me.port) as again,
        pytest.raises(ConfigError, match="--node-rank 1 is taken by"),
    ):
        again.next_round()
    assert first.why_again() is None and second.why_again() is None


def test_everything_listens_on_one_address_alone() -> None:
    store = HostedStore(HERE, 0, 5.0, None)
    listener = MessageServer(HERE, 0, lambda message: {}, KEY)
    try:
        for number in (store.port, listener.port):
            assert listening(number) == ["0100007F"], number
    finally:
        listener.close()


def listening(port: int) -> list[str]:
    """The addresses on which somebody listens on this port, as the kernel writes them."""
    found = []
    for table in ("tcp", "tcp6"):
        lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        rows = [line.split() for line in lines]
        found += [
            r[1].split(":")[0] for r in rows if r[1].endswith(f":{port:04X}") and r[3] == "0A"
        ]
    return found


def test_noise_on_the_port_disturbs_nobody() -> None:
    listener = MessageServer(HERE, 0, lambda message: {"got": message["op"]}, KEY)
    try:
        for noise in (b"\x80\x04\x95pickle\n", b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b"{}\n", b"{"):
            with socket.create_connection((HERE, listener.port), 5) as connection:
                connection.sendall(noise)
                connection.shutdown(socket.SHUT_WR)
                with suppress(ConnectionResetError):
                    assert connection.recv(100) == b""
        assert ask(HERE, listener.port, {"op": "ping"}, KEY) == {"got": "ping"}
    finally:
        listener.close()
    with pytest.raises(Gone):
        ask(HERE, listener.port, {"op": "ping"}, KEY)


def test_a_port_that_is_taken_is_an_error_at_once() -> None:
    with closing(listening_socket(HERE, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} .* --master-port"):
            listening_socket(HERE, port)
