"""train_small, in which a process of client 1 is killed while it trains."""

from __future__ import annotations

import os
import signal
import sys

from train_small import main

if __name__ == "__main__":
    if "clients/1/" in os.environ["MGT_MEASURE"] and "/round/" in os.environ["MGT_MEASURE"]:
        os.kill(os.getpid(), signal.SIGKILL)
    main(float(sys.argv[1]), int(sys.argv[2]))
