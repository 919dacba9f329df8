"""`mgt cluster`: the token and the witness that the machines of a run share."""

from __future__ import annotations

import signal
from pathlib import Path


def new_token(file: str) -> int:
    """Write a new token to `file`, mode 0600. The token itself is never shown."""
    from multi_gpu_training.distributed.cluster_token import write_new_token

    path = Path(file).absolute()
    write_new_token(path)
    print(
        f"wrote {path} (mode 0600). Copy it to every machine, for example with scp -p, and start "
        f"each with\n  mgt run --cluster-token {file} --nnodes 2 --node-rank N --master-addr ..."
    )
    return 0


def run_witness(address: str) -> int:
    """Be the witness of runs with the same token, until a signal comes."""
    from multi_gpu_training.distributed import sockets
    from multi_gpu_training.distributed.cluster_token import PUBLIC_KEY, cluster_token, network_key
    from multi_gpu_training.errors import ConfigError
    from multi_gpu_training.launch.elastic.witness import WitnessServer

    host, _, port = address.rpartition(":")
    if not host or not (port.isdecimal() and 1 <= int(port) <= 65535):
        raise ConfigError(f"mgt cluster witness {address}: give HOST:PORT, such as 10.0.0.9:29400")
    place = sockets.resolved(host.strip("[]"))
    if sockets.is_loopback(place):
        key = cluster_token() or PUBLIC_KEY  # only this user is admitted there
    else:
        key = network_key(f"a witness at {place}")
    ends = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # before there are other threads to hear them
    server = WitnessServer(place, int(port), key)
    print(f"witness at {place}:{server.port}; start all nodes with --witness {address}", flush=True)
    try:
        signal.sigwait(ends)
    finally:
        server.close()
    return 0
