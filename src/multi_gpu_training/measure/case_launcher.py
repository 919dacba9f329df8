"""`python -m ...case_launcher RANKS COMMAND`: launch the ranks of one case."""

from __future__ import annotations

import sys

from multi_gpu_training.distributed.cleanup import die_with_parent
from multi_gpu_training.launch.engine import Hosts, LaunchPlan
from multi_gpu_training.launch.launcher import supervise


def main() -> int:
    die_with_parent()
    return supervise(sys.argv[2:], LaunchPlan(int(sys.argv[1]), Hosts(), max_restarts=0))


if __name__ == "__main__":
    sys.exit(main())
