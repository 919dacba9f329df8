"""Where ranks meet that no launcher of ours started: torchrun, srun, or a person one by one.

torchrun brings a store of its own. Otherwise rank 0 hosts one, on the address that MASTER_ADDR
names and nowhere else, behind a relay (store_relay.py). Ranks on several machines then prove to
each other that they know the cluster token, before any of them opens a run folder.
"""

from __future__ import annotations

import atexit
import hmac
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed.rendezvous import rendezvous

from multi_gpu_training.distributed import sockets
from multi_gpu_training.distributed.authenticated_channel import (
    HANDSHAKE_S,
    STORE,
    Channel,
    Refused,
)
from multi_gpu_training.distributed.cluster_token import PUBLIC_KEY, network_key
from multi_gpu_training.distributed.identity import Identity
from multi_gpu_training.distributed.sockets import LOOPBACK, listening_socket
from multi_gpu_training.distributed.store_relay import KNOCK, GuardedStore, RelayProcess
from multi_gpu_training.errors import ConfigError, LaunchError

_NONCE = _PROOF = 32
_kept: list[Any] = []  # the store that this rank hosts lives as long as the process


def meets_here(identity: Identity) -> bool:
    """Whether all ranks are on this machine, so that nothing needs to leave it."""
    if os.environ.get("TORCHELASTIC_RUN_ID"):
        return not identity.on_several_hosts
    if sockets.is_loopback(os.environ.get("MASTER_ADDR", LOOPBACK)):
        return True
    alone = "LOCAL_WORLD_SIZE" in os.environ and not identity.on_several_hosts
    return alone or os.environ.get("SLURM_JOB_NUM_NODES") == "1"


def prepare(identity: Identity) -> bytes | None:
    """Set what gloo and NCCL read. Gives the key of a run on several machines, else None.

    ConfigError: several machines, and nobody gave a token.
    """
    os.environ.setdefault("MASTER_ADDR", LOOPBACK)
    os.environ.setdefault("MASTER_PORT", "29500")
    if meets_here(identity):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return None
    choose_interface(os.environ["MASTER_ADDR"])
    return network_key(f"rank {identity.rank} of a run on several machines")


def choose_interface(asked: str) -> None:
    """Let gloo and NCCL talk over the interface that leads to rank 0.

    Left to itself gloo takes the address of the machine's own name, which may be loopback.
    """
    if sockets.is_loopback(asked):
        return  # a launcher of ours is there, and has set them
    own = sockets.address_towards(_gate_address(asked), 0.0, lambda seconds: None)
    for name, value in sockets.interface_variables(own).items():
        os.environ.setdefault(name, value)


def launcher_hosts() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def join_store(identity: Identity, patience: timedelta, key: bytes | None) -> Any:
    """The store that all ranks meet at, once all are there. `key` is what `prepare` gave."""
    rank, world = identity.rank, identity.world_size
    if launcher_hosts():
        store = next(rendezvous("env://", rank, world, timeout=patience))[0]
    else:
        asked, port = os.environ["MASTER_ADDR"], _port()
        port = way_in(rank, asked, port, patience.total_seconds(), key)
        store = TCPStore(LOOPBACK, port, is_master=False, timeout=patience)
    # gloo and NCCL would wait far longer, and could not say for whom.
    store.set(f"mgt/here/{rank}", identity.host)
    names = [f"mgt/here/{other}" for other in range(world)]
    try:
        store.wait(names, patience)
    except RuntimeError:
        missing = [other for other, name in enumerate(names) if not store.check([name])]
        raise LaunchError(
            f"rank {rank} on {identity.host}: ranks {missing} of {world} did not come to "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} within "
            f"{patience.total_seconds():g} s (recovery_timeout); look for their messages there, "
            "and for connections that were refused here",
            code="MGT502",
        ) from None
    return store


def way_in(rank: int, asked: str, port: int, patience_s: float, key: bytes | None) -> int:
    """The port on loopback at which this rank reaches the store that rank 0 hosts at `asked`."""
    address = LOOPBACK if key is None else _gate_address(asked)
    token = None if key is None else key.hex()
    if rank == 0:
        return _host(address, port, token)
    _await_gate(address, port, key, patience_s)
    if key is None:
        return port
    # Speaks to rank 0's relay for this rank, and proves that it may.
    local = listening_socket(LOOPBACK, 0)
    own = int(local.getsockname()[1])
    _keep(RelayProcess([local], address=address, port=port, token=token))
    return own


def _await_gate(address: str, port: int, key: bytes | None, patience_s: float) -> None:
    """Wait for rank 0 to open its gate. LaunchError: it did not, or something else is there.

    torch waits for ever where another program listens, and never says why it was refused.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return _knock(address, port, key, min(HANDSHAKE_S, patience_s))
        except Refused as error:
            raise LaunchError(f"rank 0 at {address}:{port}: {error}", code="MGT502") from None
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"rank 0 did not answer at {address}:{port} within {patience_s:g} s "
                    f"({error}); start it with the same MASTER_ADDR and MASTER_PORT, and let "
                    "its firewall pass that port, which no other program may use",
                    code="MGT502",
                ) from None
        time.sleep(0.2)


def _knock(address: str, port: int, key: bytes | None, limit_s: float) -> None:
    if key is not None:
        Channel(address, port, key, STORE, limit_s).close()
        return
    with socket.create_connection((address, port), limit_s) as gate:
        gate.sendall(KNOCK)
        answer = gate.recv(len(KNOCK))
    if answer != KNOCK:
        if not answer:
            raise ConnectionError("it closed the connection")
        raise Refused("another program answers there", "choose another MASTER_PORT")


def _host(address: str, port: int, token: str | None) -> int:
    """Host the store in this process; the port at which this rank itself reaches it."""
    listening = [listening_socket(address, port)]
    if token is not None:
        listening.append(listening_socket(LOOPBACK, 0))
    own = int(listening[-1].getsockname()[1])
    store = GuardedStore(timedelta(minutes=30).total_seconds())
    _kept.append(store)
    relay = {"address": LOOPBACK, "port": store.port, "key": store.key.hex(), "token": token}
    _keep(RelayProcess(listening, **relay))
    return own


def _keep(relay: RelayProcess) -> None:
    _kept.append(relay)
    atexit.register(relay.close)


def _port() -> int:
    text = os.environ["MASTER_PORT"]
    if not (text.isdecimal() and 1 <= int(text) <= 65535):
        raise ConfigError(
            f"MASTER_PORT={text!r} is not a valid port; use 1 to 65535", code="MGT501"
        )
    return int(text)


def _gate_address(asked: str) -> str:
    """Where rank 0 listens for the other machines."""
    found = sockets.resolved(asked)
    # Debian has the machine's own name at 127.0.1.1, where no other machine gets to.
    return sockets.default_address() if sockets.is_loopback(found) else found


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
            "--cluster-token file on every machine. Nothing was written",
            code="MGT503",
        )


def _proof(key: bytes, rank: int, said: bytes) -> bytes:
    return hmac.digest(key, b"rank %d of" % rank + said, "sha256")


def _tensor(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
