"""Settings of the PPO recipe, beside those of every run."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from multi_gpu_training.recipes.ppo.trading import Execution
from multi_gpu_training.recipes.recipe import Options

# Fields of MultiGPUConfig where the user sets none.
CONFIG_DEFAULTS: dict[str, Any] = {
    "batch_size": 128,
    "epochs": 4,
    "learning_rate": 3e-4,
    "max_grad_norm": 0.5,
    # Sequences are cut where episodes end, so that steps differ in shape.
    "step_execution": "eager",
    # A rollout is computed in float32; so is what it is compared with.
    "use_mixed_precision": False,
    "best_metric": "return",
    "log_every": 1,
}
PositiveInt = Annotated[int, Field(gt=0)]
Size = Annotated[int, Field(gt=0, le=2**20)]  # of what is held in memory at once
Fraction = Annotated[float, Field(ge=0, le=1)]
_OF_TRADING = (
    *("data_dir", "symbols", "assets", "market_days", "episode_days", "test_fraction"),
    *("initial_balance", "trading_cost", "max_shares", "turbulence_quantile", "execution"),
    *("test_parts", "test_draws"),
)


class PPOOptions(Options):
    """`batch_size` counts environments: each brings its whole rollout to a step. `epochs` are
    the passes over a rollout."""

    env: str = Field(default="trading", description="trading, or the id of a Gymnasium environment")
    hide: list[int] = Field(default=[], description="observations to hide from the agent, like 1,3")
    env_processes: bool = Field(
        default=False, description="step each Gymnasium environment in its own process"
    )
    num_envs: Size = Field(default=500, description="environments over all ranks")
    rollout_steps: Size | None = Field(
        default=None,
        description="steps of an environment between updates; default: episode_days, or 128",
    )
    num_episodes: PositiveInt = Field(
        default=5000, description="episodes to train on, over all ranks"
    )
    total_steps: PositiveInt | None = Field(
        default=None, description="environment steps to train on, instead of num_episodes"
    )
    eval_episodes: PositiveInt = Field(
        default=20, description="episodes per evaluation (Gymnasium)"
    )
    eval_steps: PositiveInt = Field(
        default=10_000, description="longest episode of an evaluation, in steps"
    )

    normalise: bool | None = Field(
        default=None,
        description="scale observations and rewards to unit spread; default: yes, unless env is "
        "trading",
    )
    window: Size | None = Field(
        default=None, description="observations the feature LSTM sees; default: 30 trading, else 1"
    )
    features: Size = 128
    hidden: Size = 512

    gamma: Fraction = 0.99
    gae_lambda: Fraction = 0.95
    clip_range: Annotated[float, Field(gt=0)] = 0.2
    value_clip: Annotated[float, Field(gt=0)] | None = None
    value_coef: Annotated[float, Field(ge=0)] = 0.5
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    target_kl: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="a pass with a mean KL above 1.5 times this ends the update"
    )
    advantages: Literal["rollout", "minibatch", "none"] = Field(
        default="rollout",
        description="normalise advantages per rollout or minibatch (over all ranks), or not",
    )
    decay: Literal["none", "linear"] = Field(
        default="none", description="linear: learning rate and clip range fall to 0 over the run"
    )

    data_dir: str | None = Field(
        default=None, description="CSV file or folder; default: a generated market"
    )
    symbols: str | None = Field(
        default=None, description="assets to trade, like AAPL,IBM; default: all"
    )
    assets: Size = Field(default=30, description="assets of the generated market")
    market_days: Size = Field(default=2520, description="days of the generated market")
    episode_days: PositiveInt = 252
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.2, description="share of the days, at the end, kept for the test"
    )
    test_parts: PositiveInt = Field(
        default=10, description="parts of the test whose returns are compared, of 20 days or more"
    )
    test_draws: PositiveInt = Field(default=5, description="random agents to compare with")
    execution: Execution | None = Field(
        default=None,
        description="orders are filled at next_open, or at the close just seen. Default: as the "
        "resumed run did, else next_open",
    )
    initial_balance: Annotated[float, Field(gt=0)] = 1_000_000.0
    trading_cost: Annotated[float, Field(ge=0, lt=1)] = 0.001
    max_shares: PositiveInt = Field(default=100, description="shares of an asset traded in a day")
    turbulence_quantile: Fraction = Field(
        default=0.99,
        description="sell everything on days more turbulent than this share of training days",
    )

    @field_validator("hide", mode="before")
    @classmethod
    def _numbers(cls, value: Any) -> Any:
        if isinstance(value, str):
            return [part for part in value.split(",") if part.strip()]
        return [value] if isinstance(value, int) else value

    def without_effect(self) -> list[str]:
        """Options that were changed and mean nothing for this environment."""
        idle = list(_OF_TRADING)
        if self.trades:
            idle = ["hide", "env_processes", "eval_episodes", "eval_steps"]
            idle += ["symbols"] if self.data_dir is None else ["assets", "market_days"]
        plain = type(self)()
        return [name for name in idle if getattr(self, name) != getattr(plain, name)]

    @property
    def trades(self) -> bool:
        return self.env == "trading"

    @property
    def normalises(self) -> bool:
        return not self.trades if self.normalise is None else self.normalise

    @property
    def steps(self) -> int:
        return self.rollout_steps or (self.episode_days if self.trades else 128)

    @property
    def observed(self) -> int:
        return self.window or (30 if self.trades else 1)
