"""What happened in a round: for the terminal, rounds.jsonl and the report."""

from __future__ import annotations

from dataclasses import dataclass, field

from flwr.app import Message


@dataclass
class RoundRecord:
    """What happened in a round."""

    round: int
    attempt: int = 0
    asked: list[str] = field(default_factory=list)
    counted: dict[str, dict[str, float]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    update_norm: float = 0.0
    drift: float | None = None  # SecAgg+ hides what it is computed from
    bytes_out: int = 0
    bytes_in: int = 0
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    epsilon: float | None = None
    rounding: float | None = None  # SecAgg+: the largest error of an element of the mean update


def describe(record: RoundRecord, rounds: int) -> str:
    """A round in one line."""
    parts = [f"round {record.round}/{rounds}: {len(record.counted)} of {len(record.asked)} clients"]
    parts += [f"{name} {value:.4f}" for name, value in sorted(record.metrics.items())]
    if record.drift is not None:
        parts.append(f"drift {record.drift:.2f}")
    if record.epsilon is not None:
        parts.append(f"epsilon {record.epsilon:.2f}")
    if record.rounding is not None:
        parts.append(f"rounded to {record.rounding:.1g}")
    sent = record.bytes_out + record.bytes_in
    parts += [f"{sent / 2**20:.1f} MiB", f"{record.seconds:.1f} s"]
    return ", ".join(parts) + reasons(record)


def reasons(record: RoundRecord) -> str:
    return "".join(f"\n  left out {name}: {why}" for name, why in record.left_out.items())


def error_text(message: Message) -> str:
    """Why a client failed, in one line."""
    text = str(message.error.reason)
    _, found, said = text.partition(":<'")
    text = said.removesuffix("'>") if found else text
    # In a simulation, Ray's traceback comes first.
    text = text.rpartition("ClientAppException occurred. Message: ")[2]
    return " ".join(text.split())[:300]
