"""Where ranks meet that no launcher of ours started: torchrun, srun, or a person one by one.

torchrun brings a store of its own. Otherwise rank 0 hosts one, on the address that MASTER_ADDR
names and nowhere else, behind a relay (store_relay.py). Ranks on several machines then prove to
each other that they know the cluster token, before any of them opens a run folder.
"""

from __future__ import annotations

import atexit
import hmac
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed.rendezvous import rendezvous

from multi_gpu_training.distributed import sockets
from multi_gpu_training.distributed.cluster_token import PUBLIC_KEY, network_key
from multi_gpu_training.distributed.identity import Identity
from multi_gpu_training.distributed.sockets import LOOPBACK, listening_socket
from multi_gpu_training.distributed.store_relay import GuardedStore, RelayProcess
from multi_gpu_training.errors import ConfigError, LaunchError

_NONCE = _PROOF = 32
_kept: list[Any] = []  # the store that this rank hosts lives as long as the process


def meets_here(identity: Identity) -> bool:
    """Whether all ranks are on this machine, so that nothing needs to leave it."""
    if os.environ.get("TORCHELASTIC_RUN_ID"):
        return not identity.on_several_hosts
    asked = os.environ.get("MASTER_ADDR", LOOPBACK)
    return sockets.is_loopback(asked) or os.environ.get("SLURM_JOB_NUM_NODES") == "1"


def prepare(identity: Identity) -> bytes | None:
    """Set what gloo and NCCL read. Gives the key of a run on several machines, else None.

    ConfigError: several machines, and nobody gave a token.
    """
    os.environ.setdefault("MASTER_ADDR", LOOPBACK)
    os.environ.setdefault("MASTER_PORT", "29500")
    if meets_here(identity):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return None
    if not launcher_hosts():
        asked = os.environ["MASTER_ADDR"]
        for name, value in sockets.interface_variables(_own_address(identity, asked)).items():
            os.environ.setdefault(name, value)
    return network_key(f"rank {identity.rank} of a run on several machines")


def launcher_hosts() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def join_store(identity: Identity, patience: timedelta, key: bytes | None) -> Any:
    """The store that all ranks meet at. `key` is what `prepare` gave."""
    if launcher_hosts():
        rank, world = identity.rank, identity.world_size
        return next(rendezvous("env://", rank, world, timeout=patience))[0]
    asked, port = os.environ["MASTER_ADDR"], _port()
    token = None if key is None else key.hex()
    if identity.rank == 0:
        port = _host(LOOPBACK if key is None else _own_address(identity, asked), port, token)
    elif key is not None:
        # Speaks to rank 0's relay for this rank, and proves that it may.
        local = listening_socket(LOOPBACK, 0)
        port, remote = local.getsockname()[1], port
        _keep(RelayProcess([local], address=sockets.resolved(asked), port=remote, token=token))
    return TCPStore(LOOPBACK, port, is_master=False, timeout=patience)


def _host(address: str, port: int, token: str | None) -> int:
    """Host the store in this process; the port at which this rank itself reaches it."""
    listening = [listening_socket(address, port)]
    if token is not None:
        listening.append(listening_socket(LOOPBACK, 0))
    own = int(listening[-1].getsockname()[1])
    store = GuardedStore(timedelta(minutes=30).total_seconds())
    key = store.key.hex() if store.guarded else ""
    _kept.append(store)
    _keep(RelayProcess(listening, address=LOOPBACK, port=store.port, key=key, token=token))
    return own


def _keep(relay: RelayProcess) -> None:
    _kept.append(relay)
    atexit.register(relay.close)


def _port() -> int:
    text = os.environ["MASTER_PORT"]
    if not (text.isdecimal() and 1 <= int(text) <= 65535):
        raise ConfigError(f"MASTER_PORT={text!r} is not a valid port; use 1 to 65535")
    return int(text)


def _own_address(identity: Identity, asked: str) -> str:
    """This machine's address in the cluster: where rank 0 listens, where gloo and NCCL talk."""
    if identity.rank == 0:
        found = sockets.resolved(asked)
        # Debian has the machine's own name at 127.0.1.1, where no other machine gets to.
        return sockets.default_address() if sockets.is_loopback(found) else found
    return sockets.address_towards(asked, 0.0, lambda seconds: None)


def prove_membership(rank: int, key: bytes, gather: Callable[[Tensor], Tensor], host: str) -> None:
    """Every rank proves to every other that it knows the token. All ranks must call it.

    `gather` stacks same-shaped tensors of all ranks. Connections of gloo and NCCL are made before
    this and stay: whoever has none of them now cannot get in later.
    """
    nonces = gather(_tensor(os.urandom(_NONCE)))
    said = bytes(nonces.flatten().tolist())
    proofs = gather(_tensor(_proof(key, rank, said)))
    wrong = [
        other
        for other, row in enumerate(proofs)
        if not hmac.compare_digest(bytes(row.tolist()), _proof(key, other, said))
    ]
    if wrong:
        which = "no token" if key == PUBLIC_KEY else "another cluster token"
        raise LaunchError(
            f"rank {rank} on {host}: ranks {wrong} did not prove that they belong to this run; "
            f"they do not know the token of this rank (or this one has {which}). Give the same "
            "--cluster-token file on every machine. Nothing was written"
        )


def _proof(key: bytes, rank: int, said: bytes) -> bytes:
    return hmac.digest(key, b"rank %d of" % rank + said, "sha256")


def _tensor(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
