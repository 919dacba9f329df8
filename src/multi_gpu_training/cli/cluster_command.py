"""`mgt cluster`: what the machines of a run share."""

from __future__ import annotations

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
