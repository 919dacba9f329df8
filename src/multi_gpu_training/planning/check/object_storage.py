"""Whether runs can be kept at a URL: written, read, created once and deleted."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator

from multi_gpu_training.planning.check.check_report import Finding, Group
from multi_gpu_training.planning.check.registry import Context, check
from multi_gpu_training.storage.remote_folder import RemoteFolder, StorageError

STORAGE = Group("Machine").about("storage")
TRIED_BYTES = 2**20


@check(order=41)
def check_storage(context: Context) -> Iterator[Finding]:
    url = context.options.save_url
    if url is None:
        return
    name, data = f"mgt-check-{secrets.token_hex(6)}", secrets.token_bytes(TRIED_BYTES)
    begun = time.perf_counter()
    try:
        folder = RemoteFolder(url)
        folder.create(name, data)
        alone = not folder.create(name, data)
        same = folder.read(name, TRIED_BYTES) == data
        folder.delete([name])
    except (StorageError, FileNotFoundError) as error:
        text, _, remedy = str(error).rpartition("; ")
        yield STORAGE.fail(text, remedy)
        return
    took = time.perf_counter() - begun
    if not same:
        yield STORAGE.fail(f"{url}: other bytes came back than were written", "use other storage")
    elif not alone:
        text = f"{url}: it overwrites a file that was to be created only if missing"
        yield STORAGE.warn(text, "never resume one run on two machines at the same time")
    else:
        yield STORAGE.passed(f"{url}: 1 MiB written, read and deleted in {took:.1f} s")
