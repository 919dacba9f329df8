"""The store in which the ranks of one round find each other: hosted by a launcher, new each time.

It listens on one address only. PyTorch's own listens on every interface, and its rendezvous for
several nodes unpickles what it reads from the network.
"""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from multi_gpu_training.distributed.messages import listening_socket

LOOPBACK = "127.0.0.1"


def host_store(address: str, port: int, timeout_s: float) -> TCPStore:
    """A store that listens on `address` alone; port 0 is a free one. Ends when it is let go."""
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


def meeting(rank: int, nodes: int, address: str, port: int) -> RendezvousInfo:
    """What the agent is told about a round. Launchers do not use the ranks' store themselves: one
    that is gone must not hold them up."""
    return RendezvousInfo(HashStore(), rank, nodes, RendezvousStoreInfo(address, port))


class OneNode(RendezvousHandler):
    """All ranks are on this machine and meet on the loopback interface."""

    def __init__(self, run_id: str, port: int | None, timeout_s: float) -> None:
        self._run_id = run_id
        self._port = port or 0
        self._timeout_s = timeout_s
        self._store: TCPStore | None = None

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "mgt"

    def next_rendezvous(self) -> RendezvousInfo:
        self._store = None  # the port may be the same
        self._store = host_store(LOOPBACK, self._port, self._timeout_s)
        return meeting(0, 1, LOOPBACK, self._store.port)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._store = None
        return True
