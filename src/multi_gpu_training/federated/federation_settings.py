"""What a federation does: rounds, local work, strategy, which replies count, privacy.

The server keeps them in its folder, and sends clients what concerns them with every round.
"""

from __future__ import annotations

import math
import os
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.extras import install, installed

QUANTISATION = 2**22  # steps of SecAgg+ over its range, and ...
MODULUS = 2**32  # ... what the sum over all clients must stay below
Share = Annotated[float, Field(gt=0, le=1)]


class FederatedSettings(BaseModel):
    """One federation."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    rounds: int = Field(20, gt=0, le=10**6, description="rounds in all")
    local_epochs: int = Field(1, gt=0, le=10**6, description="passes of a client per round")
    local_steps: int | None = Field(None, gt=0, description="optimizer steps instead of passes")
    strategy: Literal["fedavg", "fedavgm", "fedprox", "fedadam"] = "fedavg"
    mu: float = Field(0.0, ge=0, description="fedprox: weight of the proximal term")
    server_lr: float = Field(0.1, gt=0, description="fedadam: the server's learning rate")
    server_momentum: float = Field(
        0.0, ge=0, lt=1, description="fedavgm: momentum of the server's updates"
    )
    fraction: Share = Field(1.0, description="part of the clients that train in a round")
    clients: int = Field(2, gt=0, le=10**5, description="clients that must be connected to begin")
    min_replies: Share = Field(
        0.5,
        description="part of the asked clients whose updates a round needs; else it is repeated",
    )
    retries: int = Field(3, ge=0, description="times that a failed round is repeated")
    round_timeout_s: float = Field(3600.0, gt=0, description="then a client counts as lost")
    connect_timeout_s: float = Field(600.0, gt=0, description="for enough clients to connect")
    max_update_ratio: float = Field(
        10.0,
        gt=1,
        description="an update longer than this times the median of its round is left out",
    )
    max_update_norm: float | None = Field(None, gt=0, description="or longer than this")
    evaluate_every: int = Field(1, gt=0, description="rounds between evaluations by all clients")
    seed: int = Field(0, ge=0, lt=2**63)
    secure: bool = Field(False, description="SecAgg+: the server sees only the sum of the updates")
    secure_threshold: Share = Field(
        0.6, description="part of a round's clients that must stay to the end of SecAgg+"
    )
    secure_range: float = Field(4.0, gt=0, description="largest element of an update, for SecAgg+")
    max_samples: int | None = Field(
        None, gt=0, description="most samples of a client; SecAgg+ needs it; default: 10,000"
    )
    dp: Literal["off", "server", "client"] = Field(
        "off", description="differential privacy: who clips; the server adds the noise"
    )
    dp_clip: float = Field(1.0, gt=0, description="norm that every update is clipped to")
    dp_noise: float = Field(1.0, gt=0, description="noise multiplier")
    dp_delta: float = Field(1e-5, gt=0, lt=1, description="delta that epsilon is told for")
    dp_max_epsilon: float | None = Field(None, gt=0, description="end before epsilon exceeds this")

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(
                [
                    f"--{str(one['loc'][0]).replace('_', '-')} {str(one.get('input'))[:80]}: "
                    f"{one['msg']}"
                    if one["loc"]
                    else str(one["ctx"]["error"])
                    for one in error.errors()
                ]
            ) from None

    @model_validator(mode="after")
    def _fit_together(self) -> FederatedSettings:
        problems = []
        if (self.strategy == "fedprox") != (self.mu > 0):
            problems.append("--strategy fedprox and --mu belong together; give both or neither")
        if (self.strategy == "fedavgm") != (self.server_momentum > 0):
            problems.append(
                "--strategy fedavgm and --server-momentum belong together; give both or neither"
            )
        if self.secure and self.dp != "off":
            problems.append(
                "--secure with --dp: Flower's accountant must see each client's weight, and "
                "SecAgg+ hides it; use one of them"
            )
        if self.dp != "off" and self.strategy in ("fedadam", "fedavgm"):
            problems.append(
                f"--dp with --strategy {self.strategy}: the accountant knows plain averages; use "
                "fedavg"
            )
        if self.secure and self.sampled < 3:
            problems.append(
                f"--secure with {self.sampled} clients in a round: of two, each knows the other's "
                "update from the sum; use at least 3"
            )
        if self.secure and self.sampled >= MODULUS // QUANTISATION:
            problems.append(
                f"--secure with {self.sampled} clients in a round overflows its sum; use at most "
                f"{MODULUS // QUANTISATION - 1}"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def sampled(self) -> int:
        """Clients that are asked in a round."""
        return max(1, math.floor(self.clients * self.fraction + 1e-9))

    @property
    def needed(self) -> int:
        """Updates that a round needs. Fewer would not hide a client, or not be a fair mean."""
        return self.needed_of(self.sampled)

    def needed_of(self, asked: int) -> int:
        """The same where only so many could be asked."""
        return max(1, math.ceil(asked * self.min_replies - 1e-9))

    @property
    def most_samples(self) -> int:
        """What SecAgg+ measures the weights of clients by."""
        return self.max_samples or 10_000

    def for_clients(self) -> dict[str, Any]:
        """What a client must know to train its round."""
        return {
            "rounds": self.rounds,
            "local_epochs": self.local_epochs,
            "local_steps": self.local_steps or 0,
            "mu": self.mu,
        }


def require_flower(simulation: bool = False, accountant: bool = False) -> None:
    """Raise where a package is missing; keep Flower and Ray from phoning home."""
    needs = {"flwr": True, "ray": simulation, "dp_accounting": accountant}
    missing = [package for package, needed in needs.items() if needed and not installed(package)]
    if missing:
        raise ConfigError(
            f"mgt federated needs {' and '.join(missing)}; run {install('federated')} in a "
            "separate environment: Flower pins older versions of typer, rich and protobuf",
            code="MGT105",
        )
    # Flower reads these when it is imported.
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray lowers its workers' priority to 15, under which a busy machine trains no client.
    os.environ.setdefault("RAY_worker_niceness", "0")
