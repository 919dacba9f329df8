"""Which address and interface of this machine leads to another one."""

from __future__ import annotations

import os
import socket
import time

import psutil

from multi_gpu_training.errors import LaunchError


def resolved(host: str) -> str:
    """The numeric address of `host`."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise LaunchError(
            f"--master-addr {host} is no address that this machine knows ({error}); give the "
            "address of node 0 as the other nodes reach it"
        ) from None


def address_towards(host: str, patience_s: float) -> str:
    """This machine's own address on the way to `host`; waits for a network that is down."""
    deadline = time.monotonic() + patience_s
    target = resolved(host)
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    while True:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((target, 9))  # sends nothing: only the route is looked up
                return str(probe.getsockname()[0])
            except OSError as error:
                if time.monotonic() > deadline:
                    raise LaunchError(
                        f"no way to --master-addr {host} within {patience_s:g} s "
                        f"({error.strerror}); check the network of this machine"
                    ) from None
        time.sleep(0.5)


def interface_of(address: str) -> str | None:
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address for entry in entries):
            return name
    return None


def use_interface(address: str) -> None:
    """Let gloo and NCCL talk over the interface that has `address`, unless the user chose one."""
    name = "lo" if address.startswith("127.") or address == "::1" else interface_of(address)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
