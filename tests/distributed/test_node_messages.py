"""Launchers that talk to each other on loopback: no rank is started."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from multi_gpu_training.distributed import nodes as nodes_module
from multi_gpu_training.distributed.messages import Gone, Listener, ask, listening_socket
from multi_gpu_training.distributed.nodes import Ended, Nodes
from multi_gpu_training.distributed.rank_store import OneNode, host_store
from multi_gpu_training.distributed.restarts import Fault, Limits
from multi_gpu_training.errors import ConfigError

HERE = "127.0.0.1"
LONGEST_S = 30.0


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind((HERE, 0))
        return int(probe.getsockname()[1])


@contextmanager
def node(rank: int, port: int, least: int = 1, most: int = 2) -> Iterator[Nodes]:
    found = Nodes(least, most, rank, 1, (HERE, port), HERE, timeout_s=LONGEST_S)
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
def pair() -> Iterator[tuple[Nodes, Nodes]]:
    port = free_port()
    with node(0, port) as first, node(1, port) as second:
        met = together(first.next_rendezvous, second.next_rendezvous)
        assert [info.rank for info in met] == [0, 1], met
        yield first, second


def test_ranks_are_counted_through_and_told_where_to_meet(pair: tuple[Nodes, Nodes]) -> None:
    first, second = pair
    assert (first.first_rank, second.first_rank, second.world) == (0, 1, 2)
    assert first.round.full_world == second.round.full_world == 2
    assert first.get_run_id() == second.get_run_id()
    assert first.attempt == second.attempt == 0


def test_the_others_go_on_when_a_node_ends(pair: tuple[Nodes, Nodes]) -> None:
    first, second = pair
    second.shutdown()
    until(first.num_nodes_waiting)
    info = first.next_rendezvous()
    assert (info.rank, info.world_size, first.attempt) == (0, 1, 1)


def test_when_the_leader_ends_the_next_node_leads_and_takes_it_back() -> None:
    port = free_port()
    with ExitStack() as closing_all:
        second = None
        with node(0, port) as first:
            second = closing_all.enter_context(node(1, port))
            together(first.next_rendezvous, second.next_rendezvous)
            run = first.get_run_id()
        until(second.num_nodes_waiting)
        info = second.next_rendezvous()
        assert (info.rank, info.world_size) == (0, 1)
        # Started again with the same words as before, it joins instead of beginning anew.
        returned = closing_all.enter_context(node(0, port))
        meeting = []
        thread = threading.Thread(target=lambda: meeting.append(returned.next_rendezvous()))
        thread.start()
        until(second.num_nodes_waiting)
        info = second.next_rendezvous()
        thread.join(LONGEST_S)
        assert (info.rank, info.world_size) == (0, 2)
        assert meeting[0].rank == 1 and returned.get_run_id() == run
        assert returned.attempt == second.attempt == 2


def test_the_leader_decides_for_all_whether_a_fault_is_followed_by_a_restart(
    pair: tuple[Nodes, Nodes],
) -> None:
    first, second = pair
    limits = Limits(1, 60.0)
    killed = Fault(1, "SIGKILL", 7, begun=True)
    assert second.judge(killed, limits).restart
    # The other node's ranks only lost contact: it learns why, and nothing more is counted.
    assert "SIGKILL" in str(first.fault_elsewhere())
    together(first.next_rendezvous, second.next_rendezvous)
    verdict = first.judge(Fault(0, "SIGKILL", 9, begun=True), limits)
    assert not verdict.restart and "max_restarts=1 is used up" in verdict.reason


def test_a_node_that_gives_up_ends_the_run_everywhere(pair: tuple[Nodes, Nodes]) -> None:
    first, second = pair
    second.end(2, "sample 7 has no label")
    until(first.num_nodes_waiting)
    with pytest.raises(Ended, match=r"node 1 .* ended the run:\nsample 7 has no label") as caught:
        first.next_rendezvous()
    assert caught.value.exit_code == 2


def test_a_silent_leader_is_waited_for_and_not_replaced(
    pair: tuple[Nodes, Nodes], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second = pair

    def silence(*_: Any, **__: Any) -> Any:
        raise TimeoutError("timed out")

    monkeypatch.setattr(nodes_module, "LOST_S", 0.5)
    monkeypatch.setattr(nodes_module, "ask", silence)
    second.timeout_s = 1.0
    until(second.num_nodes_waiting)
    with pytest.raises(Exception, match=r"was silent .* start the run anew .* --resume auto"):
        second.next_rendezvous()


def test_nodes_that_were_started_differently_are_told() -> None:
    port = free_port()
    told = pytest.raises(ConfigError, match="--nnodes 2:2 here, but 1:2")
    with node(0, port, 1, 2), node(1, port, 2, 2) as second, told:
        second.next_rendezvous()


def test_everything_listens_on_one_address_alone() -> None:
    store = host_store(HERE, 0, 5.0)
    alone = OneNode("run", None, 5.0)
    port = alone.next_rendezvous().bootstrap_store_info.master_port
    listener = Listener(HERE, 0, lambda message: {})
    try:
        for number in (store.port, port, listener.port):
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
    listener = Listener(HERE, 0, lambda message: {"got": message["op"]})
    try:
        for noise in (b"\x80\x04\x95pickle\n", b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b"{}\n", b"{"):
            with socket.create_connection((HERE, listener.port), 5) as connection:
                connection.sendall(noise)
                connection.shutdown(socket.SHUT_WR)
                assert connection.recv(100) == b""
        assert ask(HERE, listener.port, {"op": "ping"}) == {"got": "ping"}
    finally:
        listener.close()
    with pytest.raises(Gone):
        ask(HERE, listener.port, {"op": "ping"})


def test_a_port_that_is_taken_is_an_error_at_once() -> None:
    with closing(listening_socket(HERE, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} .* --master-port"):
            listening_socket(HERE, port)
