"""What can go wrong, as one tree.

    MultiGPUError
      ConfigError         the request contradicts itself, the machine or the data (exit code 2)
        DataError         the dataset cannot serve the request
        ModelError        the model or the loss cannot be trained as asked
      ShardError          a shard of a stream could not be read to the end
      LaunchError         ranks could not be started, or did not find each other
      RankFailure         a rank of a running job died
      CheckpointError     no intact checkpoint, or it belongs to another model
      DivergenceError     replicas differ that should be equal
      NonFiniteLossError  the loss or a gradient became NaN or infinite
      LossSpikeError      the loss jumped far above earlier values
      MemoryShortError    the smallest micro-batch does not fit into memory

Every message says what was asked, what was found and what to do next. Each kind of failure also has
a short code, which is shown below the message; `mgt explain CODE` and docs/troubleshooting.md
explain it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# A code keeps its meaning for good; docs/troubleshooting.md has the same words.
CODES = {
    "MGT100": (
        "A setting, flag or call cannot be used as given. The message lists every problem and its"
        " remedy."
    ),
    "MGT101": (
        "The command line has an unknown command or flag, is missing an argument, or gives a flag "
        "a value of the wrong type. `mgt COMMAND --help` lists the flags."
    ),
    "MGT102": (
        "No setting, option or recipe has this name. `mgt config-schema` and `mgt recipes` list "
        "them."
    ),
    "MGT103": "A config file is missing or cannot be read. It must be YAML in UTF-8.",
    "MGT104": "There is no such file or run folder. Runs are in `SAVE_DIR/RECIPE/NAME`.",
    "MGT105": "An optional package is missing. Run the `pip install` command in the message.",
    "MGT106": "The output exists already. Choose another name, or continue with `--resume`.",
    "MGT201": (
        "The GPU or device is missing, or several ranks would share it. `mgt info` shows what "
        "torch sees; `CUDA_VISIBLE_DEVICES` limits it."
    ),
    "MGT202": (
        "The number of ranks does not fit the launcher or the environment. Leave out `rank` and "
        "`world_size`; unset `RANK` and `WORLD_SIZE`."
    ),
    "MGT300": "The data cannot be used as given. The message names the file, sample or setting.",
    "MGT301": "`data_dir` is missing, or not laid out as the recipe expects.",
    "MGT302": "There are too few samples. Use more data, a smaller batch or fewer ranks.",
    "MGT303": (
        "Samples would be lost or repeated, because ranks would draw different orders. Seed the "
        "sampler or stream alike on every rank, and do not split it by rank."
    ),
    "MGT304": "A shard of a stream cannot be read to the end. Repair it, or leave it out.",
    "MGT305": (
        "The ranks hold different data. Call `torch.manual_seed` before you make, shuffle or split "
        "random data, and give every rank the whole dataset."
    ),
    "MGT400": "The model, the optimizer or your own loop cannot be trained as given.",
    "MGT401": (
        "The loss must be a scalar with a gradient, the mean over the samples. Avoid `.detach()`,"
        " `.item()` and `torch.no_grad()`."
    ),
    "MGT402": (
        "Parameters got no gradient. Use or freeze them; `find_unused_parameters=true` is for "
        "models that use different parts in different steps."
    ),
    "MGT403": (
        "A part of the model does not work with this mode or setting. Change the part, or train "
        "with plain DDP."
    ),
    "MGT404": (
        "The model cannot be loaded: its code is missing, or you have not allowed it. Keep a "
        "script's model in a separate module. Read code before you set "
        "`trust_remote_code=true` or `--trust`."
    ),
    "MGT500": "The ranks could not be started.",
    "MGT501": (
        "The port is taken or not valid. Leave out `--master-port` and `MASTER_PORT`: ranks then "
        "meet on a free port."
    ),
    "MGT502": (
        "Ranks or machines did not find each other in time. Start all of them; check address, "
        "port and firewall."
    ),
    "MGT503": (
        "The cluster token is missing, readable by others, or not the same on every machine. `mgt"
        " cluster token FILE` writes one."
    ),
    "MGT504": (
        "This node lost the others and may not continue alone. Start every node again with "
        "`--resume auto`."
    ),
    "MGT505": (
        "Slurm, Ray or Kubernetes is missing or refused. Try `scontrol ping`, `ray status` or "
        "`kubectl version`."
    ),
    "MGT600": "A rank failed. Fix what its message says, then use `--resume auto`.",
    "MGT601": (
        "A signal ended a rank. SIGKILL usually means that the host ran out of memory (see "
        "`dmesg`): use fewer `num_workers`. A person or a scheduler may also have killed it."
    ),
    "MGT602": (
        "A rank stood still. Every rank must take the same steps and make the same calls, never "
        "only where `is_main` is true."
    ),
    "MGT603": (
        "Memory ran out. Use a smaller `batch_size`; `nvidia-smi` shows who else uses the GPU."
    ),
    "MGT604": (
        "The loss or a gradient is NaN or infinite. Try a lower rate, a longer warm-up, "
        "`max_grad_norm` or bf16 instead of fp16."
    ),
    "MGT605": "The loss jumped. Lower the rate, set `max_grad_norm`, or check the data.",
    "MGT606": (
        "Ranks hold different models. Build the model from the config, not the rank; change "
        "weights on every rank alike, and never call `optimizer.step()` yourself."
    ),
    "MGT607": (
        "Recorded steps turned out wrong. The run continues from its newest good checkpoint "
        "without recording."
    ),
    "MGT700": "The checkpoint does not fit this run, or cannot be made.",
    "MGT701": "No intact checkpoint was found. `mgt checkpoints RUN` names what is damaged.",
    "MGT702": (
        "The checkpoint belongs to another model or optimizer. Resume with the code that wrote "
        "it, or choose another `--run-name`."
    ),
    "MGT703": (
        "Settings or data changed since the checkpoint. Restore them or start a new run; some "
        "changes are allowed with `--resume-anyway`."
    ),
    "MGT704": (
        "A file cannot be written. Free some space, lower `keep_last`, or choose another folder."
    ),
    "MGT705": (
        "Another process trains in this run folder. Wait for it or stop it; the lock dies with it."
    ),
    "MGT706": "A key or signature was refused. A key file must be readable by you alone.",
    "MGT707": (
        "Object storage refused, or could not be reached. Check the URL and this machine's "
        "credentials."
    ),
    "MGT800": (
        "A training started by another command failed; its message is quoted. Run it on its own "
        "to see more."
    ),
}


def with_code(text: str, code: str) -> str:
    """The message and, below it in brackets, its code.

    A message that quotes another process may end with a code already, which is the better one. An
    error of the user's own code gets none: its traceback says more, and must come last.
    """
    if code == RankFailure.code or text.rpartition("\n")[2].startswith("(MGT"):
        return text
    return f"{text}\n({code}: run `mgt explain {code}` for help)"


class MultiGPUError(Exception):
    """Uncaught, it ends a plain `python train.py` with its message alone and its `exit_code`.

    `code` is a key of CODES: that of the class, unless the one who raises it knows better.
    """

    exit_code = 1
    code = "MGT100"
    restart_helps = True  # whether the ranks may get further when they are started again

    def __init__(self, *args: object, code: str | None = None) -> None:
        super().__init__(*args)
        if code is not None:
            self.code = code
        # Only now, when there is something to show: importing and configuring change nothing.
        _show_uncaught_errors_plainly()

    def shown(self, text: str | None = None) -> str:
        """What people see: the message, or `text` in its place, and the code."""
        return with_code(str(self) if text is None else text, self.code)


class ConfigError(MultiGPUError):
    """The request cannot be carried out. `problems` holds all of them, not only the first."""

    exit_code = 2
    restart_helps = False

    def __init__(self, problems: str | Sequence[str], code: str | None = None) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__(self.under("This run cannot start:"), code=code)

    def under(self, heading: str) -> str:
        """The problems below this heading."""
        return "\n".join([heading, *(f"  - {problem}" for problem in self.problems)])


class DataError(ConfigError):
    code = "MGT300"


class ModelError(ConfigError):
    code = "MGT400"


class ShardError(MultiGPUError):
    code = "MGT304"


class LaunchError(MultiGPUError):
    code = "MGT500"


class RankFailure(MultiGPUError):
    code = "MGT600"


class CheckpointError(MultiGPUError):
    code = "MGT700"
    restart_helps = False


class DivergenceError(MultiGPUError):
    code = "MGT606"


class StaleStepsError(MultiGPUError):
    """Recorded steps turned out to differ from eager ones, and cannot be taken back in memory.
    `saved`: the newest saved step that is known to be right."""

    code = "MGT607"

    def __init__(self, problem: str, step: int, saved: int | None) -> None:
        super().__init__(
            f"recorded steps up to step {step} are wrong: {problem}. Checkpoints after step "
            f"{saved} are removed; the run continues from there without recording"
        )
        self.saved = saved


NAN_OF_A_PART = (
    "A mean over labels or pairs is NaN on a rank that has none: let the loss return (mean, weight)"
)


class NonFiniteLossError(MultiGPUError):
    """`step` would have moved the weights by NaN; it trained on the batch at (epoch, position)."""

    code = "MGT604"
    restart_helps = False  # the same steps from the same checkpoint give the same loss

    def __init__(self, step: int, epoch: int = 0, position: int = -1, text: str = "") -> None:
        super().__init__(text or f"step {step}: the gradient is not finite")
        self.step, self.epoch, self.position = step, epoch, position
        self.findings: list[Any] = []

    @property
    def ranks(self) -> list[int]:
        """The ranks whose micro-batches were bad; every rank raises the error alike."""
        return sorted({rank for rank, _ in self.findings})

    def describe(self, findings: Sequence[Any], names: Sequence[str], trainer: Any) -> None:
        """Add the diagnosis: (rank, (loss, samples, parameters)) of each bad micro-batch."""
        self.findings = list(findings)
        lines = [f"step {self.step}: the gradient is not finite; it changed no weight"]
        for rank, (loss, samples, bad) in findings[:4]:
            what = f"the loss is {loss}" if loss - loss != 0 else f"the loss is finite ({loss:g})"
            shown = ", ".join(map(str, samples[:64])) or "unknown"
            more = f" and {len(samples) - 64} more" if len(samples) > 64 else ""
            names = names or bad
            lines.append(f"rank {rank}: {what}; samples {shown}{more}")
        if not findings:
            lines.append("the loss is finite on every rank, even when the step is computed again")
        if trainer.placement.dp_size > 1 and any(loss != loss for _, (loss, *_) in findings):
            lines.append(NAN_OF_A_PART)
        if names:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            lines.append(f"parameters with a bad gradient: {', '.join(names[:8])}{more}")
        rate = float(trainer.optimizer.param_groups[0]["lr"])
        lines.append(
            f"Lower the learning rate (now {rate:g}), set max_grad_norm, or check these samples; "
            "on_nonfinite=skip skips such steps, rollback returns to the last checkpoint"
        )
        self.args = ("\n  ".join(lines),)


def add_place(error: Exception, rank: int, host: str, step: int, folder: Path) -> None:
    """Say with an error which rank raised it, where and when."""
    who = f"rank {rank} on {host}"
    blamed = error.ranks if isinstance(error, NonFiniteLossError) else []
    if blamed and rank not in blamed:  # every rank raises it; any may report first
        who = f"rank {', '.join(map(str, blamed))}, told by {who}"
    error.add_note(f"({who}, step {step}, run {folder})")


class LossSpikeError(MultiGPUError):
    """The steps trained on the batches of `epoch` from position `begin` to `end`."""

    code = "MGT605"
    restart_helps = False  # the same steps from the same checkpoint give the same loss

    def __init__(self, text: str, epoch: int, begin: int, end: int) -> None:
        super().__init__(text)
        self.epoch, self.begin, self.end = epoch, begin, end


class MemoryShortError(MultiGPUError):
    code = "MGT603"


def _show_uncaught_errors_plainly() -> None:
    """Let Python print an uncaught error of this module without a traceback, once per process.

    MGT_DEBUG=1 (`mgt --debug`) shows the traceback.
    """
    if not isinstance(sys.excepthook, _PlainErrors):
        sys.excepthook = _PlainErrors(sys.excepthook)


class _PlainErrors:
    """An excepthook; what is not an error of ours goes to the one before it."""

    def __init__(self, before: Callable[..., Any]) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if not isinstance(error, MultiGPUError):
            self._before(kind, error, trace)
            return
        if os.environ.get("MGT_DEBUG"):
            error.add_note(with_code("", error.code).strip())
            self._before(kind, error, trace)
            return
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", []))
        # Not sys.stderr: torch's hook in a rank replaces it by a buffer that is printed after us.
        print(error.shown(f"{error}{notes}"), file=sys.__stderr__ or sys.stderr, flush=True)
        sys.exit(error.exit_code)
