"""Names, addresses, ports and network cards: whether the ranks can find each other."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from multi_gpu_training.planning.check.check_report import Finding
from multi_gpu_training.planning.check.registry import Context, check
from multi_gpu_training.planning.check.topology import DEFAULT_PORT, NETWORK, MeetingPoint

GROUP, PORT = NETWORK, NETWORK.about("port")
RESOLVE_S = 5.0
CONNECT_S = 5.0
REFUSED = "nothing listens there"


@check(order=50)
def check_network(context: Context) -> Iterator[Finding]:
    yield from context.problems
    yield from judge(context.topology.meeting(), context.env)


def judge(meeting: MeetingPoint, env: Mapping[str, str]) -> Iterator[Finding]:
    yield from launcher_variables(env)
    yield from interfaces(env, _interface_names())
    yield hostname(meeting.several)
    yield from _address(meeting)
    yield from _ports(meeting)


def launcher_variables(env: Mapping[str, str]) -> Iterator[Finding]:
    """RANK and its like: all of them, numbers, and sensible."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    given = {name: env[name] for name in names if name in env}
    shown = ", ".join(f"{name}={value}" for name, value in given.items())
    odd = [f"{name}={value[:40]!r}" for name, value in given.items() if not _is_number(value)]
    problem = ""
    if odd:
        problem = f"{odd[0]} is not a whole number"
    elif "WORLD_SIZE" in given and "RANK" not in given:
        problem = f"{shown} but no RANK: this process does not know its rank and would train alone"
    elif "RANK" in given and "WORLD_SIZE" not in given:
        problem = f"{shown} but no WORLD_SIZE: it would train alone"
    elif "RANK" in given and int(given["RANK"]) >= int(given["WORLD_SIZE"]):
        problem = f"{shown}: ranks count from 0 to WORLD_SIZE - 1"
    if problem:
        set_by = "torchrun or `mgt run`, which set all of them"
        yield GROUP.fail("launcher", problem, f"unset {' '.join(given)}, or start with {set_by}")


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) < 20


def interfaces(env: Mapping[str, str], there: list[str]) -> Iterator[Finding]:
    """Network cards that NCCL and gloo are told to use."""
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = env.get(name)
        if not value:
            continue
        wanted = value.lstrip("=^").split(",")
        # NCCL takes beginnings of names, and ^ leaves them out.
        known = [w for w in wanted if any(card.startswith(w) for card in there)]
        if not value.startswith("^") and len(known) < len(wanted):
            missing = next(w for w in wanted if w not in known)
            yield GROUP.fail(
                name,
                f"{name}={value}: there is no network card {missing!r}, only {', '.join(there)}",
                f"unset {name}, or name one of these",
            )


def _interface_names() -> list[str]:
    import psutil

    try:
        return sorted(psutil.net_if_addrs())
    except (OSError, psutil.Error):
        return []


def resolve(name: str, limit_s: float = RESOLVE_S) -> list[str] | str:
    """The addresses of a name, or why there are none. A name server may never answer."""
    found: list[Any] = []

    def ask() -> None:
        try:
            found.append(sorted({str(item[4][0]) for item in socket.getaddrinfo(name, None)}))
        except (OSError, UnicodeError) as error:
            found.append(getattr(error, "strerror", None) or str(error))

    # getaddrinfo knows no time limit; a thread that never returns may be left behind.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(limit_s)
    return found[0] if found else f"no answer within {limit_s:g} s"


def hostname(several: bool = False) -> Finding:
    topic, name = GROUP.about("hostname"), socket.gethostname()
    found = resolve(name)
    if isinstance(found, str):
        return topic.warn(
            f"{name!r} does not resolve: {found}",
            f"add it to /etc/hosts: echo '127.0.1.1 {name}' | sudo tee -a /etc/hosts; with several "
            "machines, its real address",
        )
    text = f"{name} is {', '.join(found[:3])}"
    if several and _only_here(found):
        return topic.warn(
            f"{text}: gloo gives this address to the other machines, which cannot reach it",
            "put this machine's real address into /etc/hosts, or set GLOO_SOCKET_IFNAME to its "
            "network card",
        )
    return topic.passed(text)


def _only_here(addresses: list[str]) -> bool:
    return all(one.startswith("127.") or one == "::1" for one in addresses)


def _address(meeting: MeetingPoint) -> Iterator[Finding]:
    address = meeting.address
    if address is None:
        return
    topic = GROUP.about("MASTER_ADDR")
    found = resolve(address)
    if isinstance(found, str):
        yield topic.fail(
            f"{address} does not resolve: {found}",
            "set MASTER_ADDR to the IP address of the first machine, or add the name to /etc/hosts "
            "on every machine",
        )
        return
    text = address if found == [address] else f"{address} is {', '.join(found[:3])}"
    if meeting.here and not _is_mine(found):
        yield topic.fail(
            f"{text}, which is not this machine, where rank 0 runs",
            "set MASTER_ADDR to this machine's address, or start rank 0 there",
        )
    # A launcher of ours answers on each machine's loopback, and the ranks' trial shows whether.
    elif meeting.several and _only_here(found) and not meeting.held:
        yield topic.warn(
            f"{text}, which every machine takes for itself",
            "set MASTER_ADDR to an address that the other machines reach",
        )
    else:
        yield topic.passed(text)


def _is_mine(addresses: list[str]) -> bool:
    """Whether a port can be opened at one of these addresses."""
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with closing(socket.socket(family)) as probe:
                probe.bind((address, 0))
                return True
        except OSError:
            continue
    return False


def _ports(meeting: MeetingPoint) -> Iterator[Finding]:
    port = meeting.port
    if port is not None and not 1 <= port <= 65535:
        text = f"MASTER_PORT={port} is not a valid port"
        yield PORT.fail(text, "set it to a number from 1024 to 65535")
    elif port is not None and meeting.held:
        yield PORT.passed(f"{port} is held by the launcher of this run")
    elif port is not None and meeting.here:
        yield own_port(port)
    elif port is not None and meeting.address is not None:
        yield from _remote_port(meeting.address, port)
    else:
        yield _free_port()
        taken = own_port(DEFAULT_PORT)
        if taken.remedy:
            text = f"{taken.text}; it is the default where several machines meet"
            yield PORT.warn(text, "with several machines give another one: --master-port")


def _free_port() -> Finding:
    with closing(socket.socket()) as probe:
        try:
            probe.bind(("127.0.0.1", 0))
            probe.listen(1)
            with closing(socket.create_connection(probe.getsockname(), CONNECT_S)):
                return PORT.passed("a free one can be opened and reached on 127.0.0.1")
        except OSError as error:
            return PORT.fail(
                f"none can be opened and reached on 127.0.0.1: {error.strerror or error}",
                "bring the loopback interface up (ip link set lo up) and look at the firewall",
            )


def own_port(port: int) -> Finding:
    """Whether rank 0 can open this port here."""
    with closing(socket.socket()) as probe:
        # As torch opens it: a port that a run has just left is free again.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            return PORT.passed(f"{port} is free", port=port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                text = f"{port} is taken{_holder(port)}"
            else:
                text = f"{port} cannot be opened: {error.strerror}"
    none = "on one machine none: mgt then takes a free one"
    return PORT.fail(text, f"choose another MASTER_PORT (--master-port), or {none}", port=port)


def _holder(port: int) -> str:
    """Who holds it, where the system says so."""
    import psutil

    try:
        for one in psutil.net_connections("tcp"):
            if one.laddr and one.laddr.port == port and one.status == psutil.CONN_LISTEN:
                if one.pid is None:
                    return " by a process of another user"
                mine = " (this very process)" if one.pid == os.getpid() else ""
                return f" by process {one.pid} ({psutil.Process(one.pid).name()}){mine}"
    except (psutil.Error, OSError):
        pass
    return ""


def _remote_port(address: str, port: int) -> Iterator[Finding]:
    """Whether the machine of rank 0 can be reached; its port opens when rank 0 starts."""
    topic, place = GROUP.about("MASTER_PORT"), f"{address}:{port}"
    if isinstance(resolve(address), str):
        return  # said already
    problem = answer(address, port)
    if not problem:
        yield topic.passed(f"{place} answers")
    elif problem == REFUSED:
        yield topic.passed(f"{address} answers; rank 0 has not opened {port} yet")
    else:
        yield topic.fail(
            f"{place} cannot be reached: {problem}",
            f"is that machine up, and does its firewall let {port}/tcp in? nc -vz {address} {port}",
        )


def answer(address: str, port: int) -> str:
    """Why nothing answers there; empty where something does."""
    try:
        with closing(socket.create_connection((address, port), CONNECT_S)):
            return ""
    except ConnectionRefusedError:
        return REFUSED
    except TimeoutError:
        return f"no answer within {CONNECT_S:g} s"
    except OSError as error:
        return error.strerror or str(error)


def network_gbps(classes: Path) -> float | None:
    """GB/s out of this machine: all InfiniBand cards together, else the fastest Ethernet card.

    `classes` is /sys/class; None where it does not say.
    """
    rates, speeds = [], []
    for port in sorted(classes.glob("infiniband/*/ports/*")):
        with suppress(OSError, ValueError, IndexError):  # what the driver does not say is left out
            if "ACTIVE" in (port / "state").read_text():
                # `400 Gb/sec (4X NDR)`
                rates.append(float((port / "rate").read_text().split()[0]) / 8)
    for card in sorted(classes.glob("net/*")):
        with suppress(OSError, ValueError):
            if card.name != "lo":
                speeds.append(int((card / "speed").read_text()))
    fastest = max(speeds, default=0)
    if rates:
        return sum(rates)
    return fastest / 8000 if fastest > 0 else None  # the kernel counts in Mbit/s
