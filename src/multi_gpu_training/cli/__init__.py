"""The command line `mgt`: one small file a command, each imported only when it runs."""

from __future__ import annotations

import os
import sys


def main() -> None:
    from multi_gpu_training.cli.app import app
    from multi_gpu_training.errors import MultiGPUError

    # torch.distributed.launch puts it first; the environment has it as well.
    if len(sys.argv) > 1 and sys.argv[1].startswith(("--local-rank=", "--local_rank=")):
        del sys.argv[1]
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
        os.environ["MGT_DEBUG"] = "1"
    try:
        app()
    except MultiGPUError as error:
        # In a rank the error belongs to the launcher, which prints the first one once.
        if debug or "MGT_DEBUG" in os.environ or "TORCHELASTIC_ERROR_FILE" in os.environ:
            raise
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
