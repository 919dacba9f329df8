"""Nobody without the token, and no other user, gets a word in. Everything refused is counted."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from processes import quickly
from ranks import run_ranks
from test_node_messages import HERE, KEY, free_port, node, together, until
from torch._C._distributed_c10d import TCPStore

from multi_gpu_training.cli import main
from multi_gpu_training.distributed import authenticated_channel as channel
from multi_gpu_training.distributed.cluster_token import (
    INSECURE,
    TOKEN,
    TOKEN_FILE,
    cluster_token,
    network_key,
    read_token,
)
from multi_gpu_training.distributed.identity import Identity
from multi_gpu_training.distributed.meeting_place import way_in
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.distributed.sockets import connected_users, listening_socket
from multi_gpu_training.distributed.store_relay import (
    GuardedStore,
    HostedStore,
    StoreRelay,
    remote_upstream,
)
from multi_gpu_training.errors import ConfigError, LaunchError
from multi_gpu_training.launch.elastic.messages import MessageServer, ask
from multi_gpu_training.launch.elastic.rendezvous import Rendezvous
from multi_gpu_training.launch.engine import Hosts
from multi_gpu_training.launch.restart_policy import Fault, Limits

OTHER_KEY = b"a token of somebody else" * 2


@pytest.fixture
def pair() -> Iterator[tuple[Rendezvous, Rendezvous]]:
    port = free_port()
    with node(0, port) as first, node(1, port) as second:
        assert together(first.next_round, second.next_round) == [(0, 2), (1, 2)]
        yield first, second


def refused(err: str) -> int:
    """The newest count of each port, added up."""
    counts = re.findall(r"refused (\d+) connections to (.*?) so far", err)
    return sum({where: int(number) for number, where in counts}.values())


# The token


def test_mgt_cluster_token_writes_a_file_that_only_its_owner_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my.token"
    monkeypatch.setattr(sys, "argv", ["mgt", "cluster", "token", str(file)])
    with suppress(SystemExit):
        main()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    token = read_token(file)
    assert len(token) == 64 and token.decode() not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main()
    assert read_token(file) == token, "an existing token is not overwritten"
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="other users"):
        read_token(file)


def test_the_token_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (TOKEN, TOKEN_FILE, INSECURE):
        monkeypatch.delenv(name, raising=False)
    assert cluster_token() is None
    with pytest.raises(ConfigError, match=r"mgt cluster token.*--insecure-network"):
        network_key("--nnodes 2")
    monkeypatch.setenv(TOKEN, "short")
    with pytest.raises(ConfigError, match="5 characters"):
        network_key("--nnodes 2")
    monkeypatch.setenv(TOKEN, "x" * 40)
    assert network_key("--nnodes 2") == b"x" * 40
    with pytest.raises(ConfigError) as caught:
        read_token(tmp_path / "the-secret-itself")
    assert "the-secret-itself" not in str(caught.value)


def test_several_machines_refuse_to_start_without_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('started')")
    for name in (TOKEN, TOKEN_FILE, INSECURE):
        monkeypatch.delenv(name, raising=False)
    words = ["run", "--nnodes", "2", "--master-addr", "192.0.2.1", "--num-gpus", "1"]
    monkeypatch.setattr(sys, "argv", ["mgt", *words, str(tmp_path / "train.py")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and "--insecure-network" in capsys.readouterr().err


# Messages


def test_another_token_is_refused_on_both_sides_and_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = MessageServer(HERE, 0, lambda message: {}, KEY)
    try:
        with pytest.raises(ConnectionError, match="another cluster token"):
            ask(HERE, server.port, {"op": "ping"}, OTHER_KEY)
        assert ask(HERE, server.port, {"op": "ping"}, KEY) == {}
    finally:
        server.close()
    assert refused(capsys.readouterr().err) == 1


def test_nodes_with_another_token_do_not_meet_and_say_why(
    capsys: pytest.CaptureFixture[str],
) -> None:
    port = free_port()
    stranger = Rendezvous(1, 2, 1, 1, (HERE, port), HERE, 1.0, OTHER_KEY)
    with node(0, port):
        (met,) = together(stranger.next_round)
        stranger.shutdown()
    assert "another cluster token" in str(met)
    assert "another cluster token: it declined" in capsys.readouterr().err


def test_a_caller_that_loses_its_patience_is_not_called_a_stranger(
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = MessageServer(HERE, 0, lambda message: {}, KEY)
    try:
        with socket.create_connection((HERE, server.port)) as impatient:
            impatient.sendall(channel.caller_hello(channel.MESSAGES))
            impatient.recv(1)
        until(lambda: server.refusals.total)
    finally:
        server.close()
    said = capsys.readouterr().err
    assert "1 x left before its proof" in said and "token" not in said


class Recorder:
    """Passes one connection on and keeps what the caller said."""

    def __init__(self, port: int) -> None:
        self._listening = listening_socket(HERE, 0)
        self.port, self._to, self.said = self._listening.getsockname()[1], port, b""

    def pass_on(self) -> None:
        with self._listening:
            caller, _ = self._listening.accept()
        with caller, socket.create_connection((HERE, self._to), 5) as server:
            for side in (caller, server):
                side.settimeout(0.2)
            end = time.monotonic() + 3
            while time.monotonic() < end:
                for source, target in ((caller, server), (server, caller)):
                    with suppress(TimeoutError):
                        data = source.recv(65536)
                        if not data:
                            return
                        self.said += data if source is caller else b""
                        target.sendall(data)


def test_a_recorded_message_cannot_be_sent_again(capsys: pytest.CaptureFixture[str]) -> None:
    heard: list[Any] = []
    server = MessageServer(HERE, 0, lambda message: heard.append(message) or {}, KEY)
    try:
        recorder = Recorder(server.port)
        together(recorder.pass_on, lambda: ask(HERE, recorder.port, {"op": "end"}, KEY))
        assert heard == [{"op": "end"}]
        for _ in range(3):
            with socket.create_connection((HERE, server.port), 5) as again:
                again.sendall(recorder.said)
                while again.recv(1000):
                    pass
        assert heard == [{"op": "end"}]
    finally:
        server.close()
    assert refused(capsys.readouterr().err) == 3


def hello(version: int = channel.VERSION, then: float | None = None) -> bytes:
    when = time.time() if then is None else then
    return struct.pack("!3sBcd16s", b"MGT", version, b"m", when, os.urandom(16))


def noise() -> list[bytes]:
    return [
        b"[" * 500_000,
        b'{"op": "lead", "number": ' + b"9" * 5000 + b"}\n",
        b"\x1b]0;owned\x07\x1b[2J\n",
        hello(version=7) + bytes(32),
        hello(then=time.time() - 3600) + bytes(32),
        hello(then=float("nan")) + bytes(32),
        hello() + bytes(32),
        hello()[:10],
        os.urandom(4000),
        b"",
    ]


def shout(port: int, data: bytes) -> None:
    with suppress(OSError), socket.create_connection((HERE, port), 5) as connection:
        connection.settimeout(2)
        connection.sendall(data)
        while connection.recv(1000):
            pass


def test_strangers_neither_stop_launchers_nor_control_the_terminal(
    pair: tuple[Rendezvous, Rendezvous], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = pair
    for target in pair:
        together(*[lambda t=target, d=data: shout(t.me.port, d) for data in noise()])
    assert first.why_again() is None and second.why_again() is None
    assert second.judge(Fault(1, "x", 1, begun=True), Limits(1, 60.0)).restart, "both still talk"
    first.shutdown(), second.shutdown()
    said = capsys.readouterr().err
    assert refused(said) == 2 * len(noise()), said
    assert "\x1b" not in said


@pytest.mark.parametrize(
    "message",
    [
        {"op": "end", "code": 0, "text": "", "title": "x", "name": "x"},
        {"op": "end", "code": 10**30, "text": "", "title": "x", "name": "x"},
        {"op": "end", "text": "", "title": "x", "name": "x"},
        {"op": "lead", "number": 10**30, "leader": {}},
        {"op": "beat", "nodes": [1, 2], "node": {"ranks": 1_000_000}},
        {"op": "beat", "nodes": [1, 2], "node": {"port": 10**30}},
        {"op": "beat", "nodes": [1, 2], "node": {"node_rank": 7}},
        {"op": "beat", "nodes": [1, 2], "node": {"address": "\x1b[2J"}},
        {"op": "beat", "nodes": "12"},
        {"op": "fault", "fault": {"rank": "x"}, "limits": [1e999, -1], "title": "x", "round": 1},
        {"op": []},
        {},
    ],
    ids=lambda message: str(message)[:40],
)
def test_a_message_out_of_range_is_refused_even_with_the_token(
    pair: tuple[Rendezvous, Rendezvous], message: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = pair
    whole = {**asdict(second.me), "name": "9-x", "node_rank": 1}
    for part in ("node", "leader"):
        if part in message:
            message = {**message, part: {**whole, **message[part]}}
    with suppress(ConnectionError):
        assert ask(HERE, first.me.port, message, KEY) == {}
        assert message.get("op") in ([], None)
    assert first.why_again() is None and second.why_again() is None
    until(lambda: first.round.number == 1 and second.round.number == 1)


def test_slow_connections_make_no_threads_and_do_not_keep_others_out() -> None:
    server = MessageServer(HERE, 0, lambda message: {}, KEY)
    before = threading.active_count()
    slow = []
    try:
        for _ in range(150):
            slow.append(socket.create_connection((HERE, server.port), 60))
        assert threading.active_count() <= before
        assert ask(HERE, server.port, {"op": "ping"}, KEY, 30.0) == {}
        until(lambda: server.refusals.total >= 150 - channel.MOST_PENDING)
    finally:
        for connection in slow:
            connection.close()
        server.close()


def test_what_comes_from_elsewhere_is_printed_without_control_characters() -> None:
    assert channel.printable("a\x1b[2J\x07\u202eb\n") == "a?[2J??b\n"


def test_nodes_need_an_address_and_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="needs --master-addr"):
        monkeypatch.delenv("MASTER_ADDR", raising=False)
        Hosts.from_environment(nodes="2")


# The store


def client(port: int, timeout_s: float = 10.0) -> TCPStore:
    return TCPStore(HERE, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def test_the_store_itself_answers_nobody_but_its_relay() -> None:
    guarded = GuardedStore(5.0)
    if not guarded.key:
        pytest.skip("this kernel has no TCP MD5 signatures")
    for source in (HERE, "127.0.0.2"):
        with socket.socket() as stranger:
            stranger.settimeout(0.5)
            stranger.bind((source, 0))
            with pytest.raises(TimeoutError):
                stranger.connect((HERE, guarded.port))
    assert guarded.store is not None
    guarded.store.set("a", "b")
    assert guarded.store.get("a") == b"b"


AS_NOBODY = """
import socket, sys
for port in map(int, sys.argv[1:]):
    with socket.socket() as s:
        s.settimeout(2)
        try:
            s.connect(("127.0.0.1", port))
            s.sendall(bytes(64))
            print(port, len(s.recv(10)))
        except OSError as error:
            print(port, type(error).__name__)
"""


def test_another_user_of_this_machine_cannot_reach_the_store(
    capsys: pytest.CaptureFixture[str],
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    hosted = HostedStore(HERE, 0, 10.0, None)
    try:
        mine = client(hosted.port)
        mine.set("asked", "no")
        words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3"]
        ports = [str(hosted.port)]
        said = subprocess.run(
            [*words, "-c", AS_NOBODY, *ports], capture_output=True, text=True, timeout=60
        )
        answers = [line.split()[1] for line in said.stdout.splitlines()]
        assert answers and set(answers) <= {"0", "ConnectionResetError", "TimeoutError"}, said
        assert mine.get("asked") == b"no"
    finally:
        hosted.close()
    assert "1 x another user of this machine" in capsys.readouterr().err


def test_relays_carry_the_store_to_another_machine_with_the_token_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    gate = HostedStore(HERE, 0, 10.0, KEY)
    relays = [
        StoreRelay(listening_socket(HERE, 0), remote_upstream(HERE, gate.port, key))
        for key in (KEY, OTHER_KEY)
    ]
    try:
        one, other = client(relays[0].port), client(relays[0].port)
        one.set("big", "x" * 300_000)
        assert len(other.get("big")) == 300_000
        assert other.clone().add("n", 2) == 2
        with pytest.raises(RuntimeError):
            client(relays[1].port, 1.0)
        with pytest.raises(RuntimeError):  # the gate does not speak TCPStore
            client(gate.port, 1.0)
    finally:
        for found in (*relays, gate):
            found.close()
    assert refused(capsys.readouterr().err) >= 2


# Ranks that no launcher of ours started

BY_HAND = """
import json, sys, time, psutil
from datetime import timedelta
from pathlib import Path
import torch.distributed as dist
from multi_gpu_training import MultiGPUConfig
from multi_gpu_training.distributed.placement import place

placement = place(MultiGPUConfig(device="cpu"))
placement.barrier()
me = psutil.Process()
found = [c.laddr.ip for p in (me, *me.children()) for c in p.net_connections("tcp")
         if c.status == psutil.CONN_LISTEN]
everybody = placement.gather_json(found)
assert placement.all_min(placement.dp_rank) == 0
for child in me.children():
    child.terminate()  # as Slurm does with every process of a step
time.sleep(0.5)
store = dist.distributed_c10d._get_default_store()
store.set(f"saved/{placement.dp_rank}", "yes")
store.wait([f"saved/{rank}" for rank in range(2)], timedelta(seconds=20))
placement.barrier()
placement.close()
left = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
# Such a thread may need the interpreter when that is gone, which aborts the process.
assert not [name for name in left if "gloo" in name], left
if placement.is_main:
    print(json.dumps(everybody))
"""


@pytest.mark.timeout(200)
def test_ranks_started_by_hand_listen_on_loopback_alone_and_keep_their_store_on_sigterm(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(BY_HAND)
    port = free_port()
    ranks = []
    for rank in range(2):
        env = quickly() | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        env |= {"MASTER_ADDR": HERE, "MASTER_PORT": str(port)}
        env.pop("GLOO_SOCKET_IFNAME", None)
        words = [sys.executable, "train.py"]
        ranks.append(
            subprocess.Popen(words, cwd=tmp_path, env=env, stdout=-1, stderr=-1, text=True)
        )
    said = [rank.communicate(timeout=180) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    addresses = json.loads(said[0][0].strip().splitlines()[-1])
    assert addresses[0] and {a for rank in addresses for a in rank} <= {HERE}, said


@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
@pytest.mark.parametrize("key", [None, KEY])
def test_a_rank_does_not_wait_for_ever_at_a_port_of_another_program(
    says: bytes, key: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multi_gpu_training.distributed.sockets.default_address", lambda: HERE)

    def answer() -> None:
        with suppress(OSError):
            while True:
                callers.append(server.accept()[0])
                callers[-1].sendall(says * 3)

    callers: list[socket.socket] = []
    with listening_socket(HERE, 0) as server:
        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(LaunchError, match=r"another program|did not answer"):
            way_in(1, HERE, server.getsockname()[1], 0.5, key)
        server.shutdown(socket.SHUT_RDWR)
    for caller in callers:
        caller.close()


def prove() -> list[str]:
    from multi_gpu_training.distributed.meeting_place import prove_membership

    placement = Placement(Identity(dist.get_rank(), 0, 2, 1), "cpu", dist.group.WORLD)
    said = []
    for token in (b"the right token", b"another token"):
        key = token if dist.get_rank() == 0 else b"the right token"
        try:
            prove_membership(dist.get_rank(), key, placement.gather, "here")
            said.append("proved")
        except LaunchError as error:
            said.append(str(error))
    return said


def test_a_rank_proves_the_token_before_it_takes_part() -> None:
    first, second = run_ranks(2, prove)
    assert [first[0], second[0]] == ["proved", "proved"]
    assert "ranks [1] did not prove" in first[1] and "ranks [0] did not prove" in second[1]


# Machines that lack something

LACKS = """
import socket

class Poor(socket.socket):
    def __init__(self, family=-1, *more, **named):
        if family == socket.AF_NETLINK:
            raise OSError(97, "Address family not supported by protocol")
        super().__init__(family, *more, **named)

    def setsockopt(self, level, name, *more):
        if level == socket.IPPROTO_TCP and name == 32:
            raise OSError(92, "Protocol not available")
        return super().setsockopt(level, name, *more)

socket.socket = Poor
"""
SUM = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
t = torch.ones(1)
dist.all_reduce(t)
print("sum", t.item())
dist.destroy_process_group()
"""
HIDE = 'mount -t proc -o subset=pid proc /proc && exec "$@"'


def test_a_container_without_signatures_netlink_and_proc_net_trains_and_warns(
    tmp_path: Path,
) -> None:
    hide = ["unshare", "-m", "sh", "-c", HIDE, "sh"]
    if os.geteuid() != 0 or subprocess.run([*hide, "true"], capture_output=True).returncode:
        pytest.skip("this machine cannot hide /proc/net")
    (tmp_path / "sitecustomize.py").write_text(LACKS)
    (tmp_path / "sum.py").write_text(SUM)
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    words = [sys.executable, "-m", "multi_gpu_training", "run", "--num-gpus", "2", "sum.py"]
    env = {**os.environ, "PYTHONPATH": path}
    found = subprocess.run(
        [*hide, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 0 and found.stdout.count("2.0") == 2, found.stderr
    assert "no TCP MD5 signatures, so other users" in found.stderr
    assert "neither netlink nor /proc/net tells here who connects" in found.stderr


def test_the_kernel_says_who_connects_with_and_without_netlink(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with listening_socket(HERE, 0) as server, socket.socket(socket.AF_INET6) as mapped:
        port = server.getsockname()[1]
        mapped.connect((f"::ffff:{HERE}", port))  # as torch does
        with socket.create_connection((HERE, port)) as plain:
            ends = [end.getsockname()[1] for end in (mapped, plain)]
            assert [connected_users(end, port) for end in ends] == [[os.geteuid()]] * 2
            monkeypatch.setattr(socket, "AF_NETLINK", -5)
            assert [connected_users(end, port) for end in ends] == [[os.geteuid()]] * 2
            assert len(connected_users(0, port)) == 2
