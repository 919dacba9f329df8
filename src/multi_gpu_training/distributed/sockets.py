"""Addresses and sockets: where launchers and ranks of a run meet, and which users connect there.

Everything listens on one address only. PyTorch's own rendezvous listens on every interface, and
for several nodes it unpickles what it reads from the network.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from multi_gpu_training.errors import ConfigError, LaunchError
from multi_gpu_training.portability import LOOPBACK_INTERFACE

LOOPBACK = "127.0.0.1"
ESTABLISHED, ANY_STATE = 1 << 1, 0xFFFFFFFF
_NETLINK_SOCK_DIAG, _BY_FAMILY, _DUMP_REQUEST = 4, 20, 0x301
_ERROR, _DONE = 2, 3


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("::1", "localhost")


def listening_socket(address: str, port: int) -> socket.socket:
    """A socket that listens on this address alone; port 0 is any free one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.socket(family)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address, port))
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"port {port} for {address} cannot be used: {error.strerror}; choose another "
            "--master-port (MASTER_PORT), or drop it for a free one; --master-addr (MASTER_ADDR) "
            "must be an address of node 0",
            code="MGT501",
        ) from None
    return listening


def resolved(host: str) -> str:
    """The numeric address of `host`."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, ValueError) as error:  # ValueError: what no name can be
        raise LaunchError(
            f"--master-addr {host[:200]} is not an address that this machine knows ({error}); give "
            "the address at which the other nodes reach node 0",
            code="MGT502",
        ) from None


def address_towards(host: str, patience_s: float, pause: Callable[[float], None]) -> str:
    """This machine's own address on the way to `host`; waits for a network that is down."""
    target, waited_s = resolved(host), 0.0
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    while True:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((target, 9))  # sends nothing, only looks up the route
                return str(probe.getsockname()[0])
            except OSError as error:
                if waited_s > patience_s:
                    raise LaunchError(
                        f"no route to --master-addr {host} within {patience_s:g} s "
                        f"({error.strerror}); check the network of this machine",
                        code="MGT502",
                    ) from None
        pause(0.5)
        waited_s += 0.5


def default_address() -> str:
    """This machine's own address on its default route."""
    # Addresses for documentation; nothing is sent, only the route is looked up.
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((target, 9))
                return str(probe.getsockname()[0])
        except OSError:
            continue
    raise LaunchError(
        "MASTER_ADDR is a name that means loopback on this machine, and it has no default "
        "route; give the address at which the other machines reach it",
        code="MGT502",
    )


def interface_of(address: str) -> str | None:
    """The name of the interface that has `address`."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address for entry in entries):
            return name
    return None


def interface_variables(address: str) -> dict[str, str]:
    """Let gloo and NCCL talk over the interface that has `address`, unless the user chose one."""
    name = LOOPBACK_INTERFACE if is_loopback(address) else interface_of(address)
    chosen = {v: os.environ.get(v, name) for v in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    return {variable: found for variable, found in chosen.items() if found is not None}


# Who is connected, on this machine


def connected_users(source: int, target: int, states: int = ESTABLISHED) -> list[int]:
    """Whose sockets here are connected from port `source` (0: any) to port `target`.

    OSError: this kernel or container does not say.
    """
    try:
        return [
            uid
            for family in (socket.AF_INET, socket.AF_INET6)  # torch's client is IPv6, mapped
            for uid in _ask_kernel(family, source, target, states)
        ]
    except (OSError, AttributeError):  # AttributeError: a system without netlink
        return list(_read_tables(source, target, states))


def _ask_kernel(family: int, source: int, target: int, states: int) -> Iterator[int]:
    """From netlink (man 7 sock_diag): the kernel picks them, whatever the number of sockets."""
    wanted = struct.pack("=BBxxI", family, socket.IPPROTO_TCP, states)
    wanted += struct.pack("!HH", source, target).ljust(48, b"\0")
    header = struct.pack("=IHHII", 16 + len(wanted), _BY_FAMILY, _DUMP_REQUEST, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(5.0)
        kernel.send(header + wanted)
        while True:
            answer = kernel.recv(1 << 16)
            while answer:
                length, kind = struct.unpack_from("=IH", answer)
                if kind == _ERROR:
                    raise OSError(-struct.unpack_from("=i", answer, 16)[0], "sock_diag")
                if kind == _DONE:
                    return
                yield struct.unpack_from("=I", answer, 80)[0]  # idiag_uid
                answer = answer[(length + 3) & ~3 :]


def _read_tables(source: int, target: int, states: int) -> Iterator[int]:
    """From /proc/net, where there is no sock_diag."""
    for name in ("tcp", "tcp6"):
        file = Path("/proc/net", name)
        if name == "tcp6" and not file.exists():  # a kernel without IPv6
            continue
        for row in map(str.split, file.read_text().splitlines()[1:]):
            here, there = (int(end.rpartition(":")[2], 16) for end in row[1:3])
            if there == target and source in (0, here) and states >> int(row[3], 16) & 1:
                yield int(row[7])
