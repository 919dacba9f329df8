"""What can go wrong, as one tree.

    MultiGPUError
      ConfigError         the request contradicts itself, the machine or the data (exit code 2)
        DataError         the dataset cannot serve the request
        ModelError        the model or the loss cannot be trained as asked
      LaunchError         ranks could not be started or found each other
      RankFailure         a rank of a running job died
      CheckpointError     nothing intact to load, or it belongs to another model
      DivergenceError     replicas that should be equal are not
      NonFiniteLossError  the loss or a gradient became NaN or infinite
      LossSpikeError      the loss jumped far above what it was
      MemoryShortError    the smallest micro-batch does not fit into memory

Every message says what was asked, what was found and what to do next.
"""

from __future__ import annotations

from collections.abc import Sequence


class MultiGPUError(Exception):
    exit_code = 1
    restart_helps = True  # whether the ranks may get further when they are started again


class ConfigError(MultiGPUError):
    """The request cannot be carried out. `problems` holds all of them, not only the first."""

    exit_code = 2
    restart_helps = False

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__(
            "This run cannot start:\n" + "\n".join(f"  - {problem}" for problem in self.problems)
        )


class DataError(ConfigError):
    pass


class ModelError(ConfigError):
    pass


class LaunchError(MultiGPUError):
    pass


class RankFailure(MultiGPUError):
    pass


class CheckpointError(MultiGPUError):
    restart_helps = False


class DivergenceError(MultiGPUError):
    pass


class NonFiniteLossError(MultiGPUError):
    restart_helps = False  # the same steps from the same checkpoint give the same loss


class LossSpikeError(MultiGPUError):
    restart_helps = False  # the same steps from the same checkpoint give the same loss


class MemoryShortError(MultiGPUError):
    pass
