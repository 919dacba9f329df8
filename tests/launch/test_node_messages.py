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
from multi_gpu_training.launch.elastic import rendezvous
from multi_gpu_training.launch.elastic.messages import Gone, MessageServer, ask
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
def node(rank: int, port: int, least: int = 1, most: int = 2) -> Iterator[Rendezvous]:
    found = Rendezvous(least, most, rank, 1, (HERE, port), HERE, timeout_s=LONGEST_S, key=KEY)
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


def test_the_others_go_on_when_a_node_ends(pair: tuple[Rendezvous, Rendezvous]) -> None:
    first, second = pair
    second.shutdown()
    until(first.why_again)
    assert first.next_round() == (0, 1)
    assert first.attempt == 1


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


def test_a_silent_leader_is_waited_for_and_not_replaced(
    pair: tuple[Rendezvous, Rendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second = pair

    def silence(*_: Any, **__: Any) -> Any:
        raise TimeoutError("timed out")

    monkeypatch.setattr(rendezvous, "LOST_S", 0.5)
    monkeypatch.setattr(rendezvous, "ask", silence)
    second.timeout_s = 1.0
    until(second.why_again)
    with pytest.raises(NotMet, match=r"was silent .* start the run anew .* --resume auto"):
        second.next_round()


def test_nodes_that_were_started_differently_are_told() -> None:
    port = free_port()
    told = pytest.raises(ConfigError, match="--nnodes 2:2 here, but 1:2")
    with node(0, port, 1, 2), node(1, port, 2, 2) as second, told:
        second.next_round()


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
