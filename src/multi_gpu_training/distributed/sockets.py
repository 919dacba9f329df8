"""Addresses and listening sockets: where launchers and ranks of a run meet.

Everything listens on one address only. PyTorch's own rendezvous listens on every interface, and
for several nodes it unpickles what it reads from the network.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import psutil

from multi_gpu_training.errors import ConfigError, LaunchError

LOOPBACK = "127.0.0.1"


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


def default_address() -> str:
    """This machine's own address on its default route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing, only looks up the route
        except OSError:
            raise LaunchError(
                "MASTER_ADDR is a name that means loopback on this machine, and it has no default "
                "route; give the address at which the other machines reach it"
            ) from None
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The name of the interface that has `address`."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address for entry in entries):
            return name
    return None


def interface_variables(address: str) -> dict[str, str]:
    """Let gloo and NCCL talk over the interface that has `address`, unless the user chose one."""
    name = "lo" if is_loopback(address) else interface_of(address)
    chosen = {v: os.environ.get(v, name) for v in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
    return {variable: found for variable, found in chosen.items() if found is not None}
