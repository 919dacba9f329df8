"""Addresses and listening sockets: where launchers and ranks of a run meet.

Everything listens on one address only. PyTorch's own rendezvous listens on every interface, and
for several nodes it unpickles what it reads from the network.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import psutil

from multi_gpu_training.errors import ConfigError, LaunchError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

LOOPBACK = "127.0.0.1"


def host_store(address: str, port: int, timeout_s: float) -> TCPStore:
    """A store for the ranks of one attempt, on `address` alone; port 0 is a free one.

    It closes when the last reference to it is dropped.
    """
    from torch._C._distributed_c10d import TCPStore

    listening = listening_socket(address, port)
    found = listening.getsockname()[1]
    return TCPStore(
        address,
        found,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


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
            "--master-port, or drop it for a free one; --master-addr must be an address of node 0"
        ) from None
    return listening


def resolved(host: str) -> str:
    """The numeric address of `host`."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise LaunchError(
            f"--master-addr {host} is not an address that this machine knows ({error}); give the "
            "address at which the other nodes reach node 0"
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
                        f"({error.strerror}); check the network of this machine"
                    ) from None
        pause(0.5)
        waited_s += 0.5


def interface_of(address: str) -> str | None:
    """The name of the interface that has `address`."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address for entry in entries):
            return name
    return None


def interface_variables(address: str) -> dict[str, str]:
    """Let gloo and NCCL talk over the interface that has `address`, unless the user chose one."""
    name = "lo" if address.startswith("127.") or address == "::1" else interface_of(address)
    chosen = {v: os.environ.get(v, name) for v in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    return {variable: found for variable, found in chosen.items() if found is not None}
