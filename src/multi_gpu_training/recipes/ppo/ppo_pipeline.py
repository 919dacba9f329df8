"""Policies after training: from observations to actions, and whole episodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from multi_gpu_training.data.order import derive_seed
from multi_gpu_training.distributed.placement import Placement
from multi_gpu_training.errors import ConfigError, DataError
from multi_gpu_training.recipes.pipeline import Pipeline, Result, TensorSpec, device_of
from multi_gpu_training.recipes.ppo.options import PPOOptions
from multi_gpu_training.recipes.ppo.policy import Actions, CLSTMPolicy
from multi_gpu_training.recipes.ppo.policy_evaluation import evaluate
from multi_gpu_training.recipes.ppo.rollout import Collector
from multi_gpu_training.recipes.ppo.worlds import build_world
from multi_gpu_training.safe_files import read_json
from multi_gpu_training.safe_output import brief

_PLAY = 0x91A7  # sets the seeds of played episodes apart from those of training and evaluation


def describe_policy(policy: CLSTMPolicy, options: PPOOptions) -> dict[str, Any]:
    return {
        "recipe": "ppo",
        "model": {
            "observation_size": policy.observation_size,
            "actions": {"kind": policy.actions.kind, "size": policy.actions.size},
            "window": policy.window,
            "features": policy.feature.hidden_size,
            "hidden": policy.hidden,
        },
        "preprocessing": {
            "environment": options.env,
            "hidden_observations": list(options.hide),
            "normalise": options.normalises,
        },
    }


class PolicyStep(nn.Module):
    """One step: observations (N, window, O) and state (N, 4, H) -> head, values, next state.

    The state is hidden and cell of the actor, then of the critic; zeros where an episode begins.
    Observations are as the environment gives them.
    """

    def __init__(self, policy: CLSTMPolicy, normalise: bool) -> None:
        super().__init__()
        self.policy, self.normalise = policy, normalise

    def forward(self, observations: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        policy = self.policy
        seen = policy.normalise(observations) if self.normalise else observations
        features = policy.feature(seen)[0][:, -1:]
        parts = state.transpose(0, 1)
        actor, after = policy.actor(features, (parts[0:1], parts[1:2]))
        critic, judged = policy.critic(features, (parts[2:3], parts[3:4]))
        values = policy.value_head(critic[:, 0]).squeeze(-1)
        state = torch.cat([*after, *judged]).transpose(0, 1)
        return policy.action_head(actor[:, 0]), values, state


class PPOPipeline(Pipeline):
    """Raw input of `act`: an observation, the newest of several, or {"observation": ..., "state":
    ...} with the state of the step before. Of `play`: numbers of episodes."""

    recipe = "ppo"
    tasks = ("act", "play")

    @classmethod
    def recovered(
        cls, options: Mapping[str, Any], tensors: Mapping[str, Tensor], seed: int, trust: bool
    ) -> dict[str, Any]:
        """From the shapes of the weights: no environment is needed."""
        found = cls.checked_options(options, trust)
        assert isinstance(found, PPOOptions)
        size = tensors["feature.weight_ih_l0"].shape[1]
        kind: Any = "continuous" if "log_std" in tensors else "discrete"
        actions = Actions(kind, len(tensors["action_head.bias"]))
        policy = CLSTMPolicy(size, actions, found.observed, found.features, found.hidden)
        return describe_policy(policy, found)

    def build_model(self) -> CLSTMPolicy:
        given = self.arguments
        return CLSTMPolicy(
            int(given["observation_size"]),
            Actions(given["actions"]["kind"], int(given["actions"]["size"])),
            int(given["window"]),
            int(given["features"]),
            int(given["hidden"]),
        )

    def program(self, model: nn.Module) -> nn.Module:
        assert isinstance(model, CLSTMPolicy)
        return PolicyStep(model, bool(self.preprocessing["normalise"]))

    def inputs(self) -> list[TensorSpec]:
        given = self.arguments
        seen = ("batch", given["window"], given["observation_size"])
        state = ("batch", 4, given["hidden"])
        return [
            TensorSpec("observations", "float32", seen, "the last ones, zeros before the first"),
            TensorSpec("state", "float32", state, "of the step before; zeros at the beginning"),
        ]

    def outputs(self) -> list[TensorSpec]:
        given = self.arguments
        discrete = given["actions"]["kind"] == "discrete"
        head = "scores of the actions" if discrete else "the action"
        return [
            TensorSpec("head", "float32", ("batch", given["actions"]["size"]), head),
            TensorSpec("values", "float32", ("batch",), "what the critic expects"),
            TensorSpec("next_state", "float32", ("batch", 4, given["hidden"]), "for the next step"),
        ]

    def sample(self, raw: Any) -> tuple[Tensor, Tensor]:
        given = self.arguments
        window, size, hidden = given["window"], given["observation_size"], given["hidden"]
        state = torch.zeros(4, hidden)
        if isinstance(raw, Mapping):
            if "observation" not in raw:
                raise DataError('an observation is missing; give {"observation": [...]}')
            if raw.get("state") is not None:
                state = _numbers(raw["state"], "state")
            raw = raw["observation"]
        seen = _numbers(raw, "observation")
        seen = seen.unsqueeze(0) if seen.ndim == 1 else seen
        if seen.ndim != 2 or seen.shape[1] != size or len(seen) > window:
            raise DataError(
                f"an observation of shape {tuple(seen.shape)} was given; this policy takes "
                f"{size} numbers, or up to {window} such rows, the newest last"
            )
        if tuple(state.shape) != (4, hidden):
            raise DataError(f"a state of shape {tuple(state.shape)} was given, not (4, {hidden})")
        before = torch.zeros(window - len(seen), size)
        return torch.cat([before, seen]), state

    def collate(self, samples: Sequence[Any]) -> tuple[Tensor, ...]:
        seen, states = zip(*samples, strict=True)
        return torch.stack(list(seen)), torch.stack(list(states))

    def read(self, outputs: tuple[Tensor, ...], samples: Sequence[Any]) -> list[Result]:
        heads, values, states = outputs
        discrete = self.arguments["actions"]["kind"] == "discrete"
        found = []
        for head, value, state in zip(heads, values.tolist(), states, strict=True):
            result: Result = {"action": head.tolist(), "value": value, "state": state.tolist()}
            if discrete:
                result["action"] = int(head.argmax())
                result["scores"] = head.double().softmax(0).tolist()
            found.append(result)
        return found

    def synthetic(self, count: int) -> list[Any]:
        given = self.arguments
        noise = torch.Generator().manual_seed(0)
        shape = (count, int(given["window"]), int(given["observation_size"]))
        seen = torch.randn(shape, generator=noise)
        states = 0.1 * torch.randn(count, 4, int(given["hidden"]), generator=noise)
        return list(zip(seen, states, strict=True))

    @classmethod
    def code_in(cls, options: Mapping[str, Any]) -> str | None:
        named = str(options.get("env") or "")
        return f"env={named}" if ":" in named else None

    # Episodes

    def find(self, word: str, task: str) -> list[tuple[str, Any]]:
        """For play how many episodes; for act a JSON file of observations."""
        if task == "play":
            if not word.isdecimal() or not 0 < int(word) <= 100_000:
                raise DataError(f"{brief(word)}: give the number of episodes to play, such as 10")
            return [(f"episode {number}", number) for number in range(int(word))]
        try:
            rows = read_json(Path(word), list[Any])
        except (OSError, ValueError) as error:
            raise DataError(
                f"{brief(word)} cannot be read ({error!s:.200}); give a JSON file with a list of "
                "observations"
            ) from None
        return [(f"{word}:{number}", row) for number, row in enumerate(rows)]

    def perform(
        self,
        task: str,
        model: nn.Module,
        raws: Sequence[Any],
        batch_size: int,
        first: int = 0,
        **how: Any,
    ) -> Iterator[Result]:
        if task != "play":
            return super().perform(task, model, raws, batch_size, first, **how)
        return self.play(model, [int(number) for number in raws], **how)

    def play(
        self, model: nn.Module, episodes: Sequence[int], record: str | None = None
    ) -> Iterator[Result]:
        """Play episodes with the likeliest actions; each has its own seed by its number. record:
        a folder for GIFs, where the environment renders."""
        from multi_gpu_training.recipes.ppo.played_episodes import play_episode

        options = self.policy_options()
        if options.trades:
            raise ConfigError(
                "a trading policy plays no episodes; mgt evaluate trades the test period, and "
                "mgt predict --task act takes observations"
            )
        assert isinstance(model, CLSTMPolicy)
        seed = derive_seed(self.seed, _PLAY)
        for number in episodes:
            yield play_episode(model, options, number, seed, record)

    def policy_options(self, data_dir: str | None = None) -> PPOOptions:
        found = self.run_options(data_dir)
        assert isinstance(found, PPOOptions)
        if found.trades and found.execution is None:
            # Up to version 0.1 orders were filled at the close just seen.
            found = found.model_copy(update={"execution": "close"})
        return found

    def evaluate(
        self,
        model: nn.Module,
        data_dir: str | None = None,
        part: str | None = None,
        batch_size: int | None = None,
        placement: Placement | None = None,
    ) -> dict[str, float]:
        assert isinstance(model, CLSTMPolicy)
        options = self.policy_options(data_dir)
        placement = placement or Placement(device=device_of(model))
        torch.manual_seed(self.seed)
        start = self.build_model().to(device_of(model))  # as it was before training
        world = build_world(options, range(1), self.seed, 0, placement.device)
        try:
            seen = world.environments.observation_size
            if seen != model.observation_size:
                raise DataError(
                    f"this environment shows {seen} numbers, and the policy was trained on "
                    f"{model.observation_size}; give the same assets or the same environment"
                )
            metrics, _ = evaluate(model, start, world, options, self.seed, placement)
        finally:
            world.environments.close()
        return metrics

    def examples(self, count: int) -> list[Any]:
        """Observations of a random walk through the run's environment."""
        options = self.policy_options()
        world = build_world(options, range(1), self.seed, 0, torch.device("cpu"))
        try:
            policy = self.build_model()
            collector = Collector(world.environments, policy)
            rollout, _ = collector.collect(count, policy.actions.noise(count, 1, self.seed))
        finally:
            world.environments.close()
        return [row.numpy() for row in rollout.observations[0].float()]


def _numbers(given: Any, named: str) -> Tensor:
    try:
        found = torch.as_tensor(np.asarray(given, dtype=np.float32))
    except (TypeError, ValueError):
        raise DataError(f"the {named} is not an array of numbers") from None
    if not bool(found.isfinite().all()):
        raise DataError(f"the {named} holds a number that is not finite")
    return found


PIPELINE = PPOPipeline
