"""Recurrent PPO (CLSTM) that trades, or plays any Gymnasium environment.

mgt train ppo                                          trade on a generated market
mgt train ppo --data-dir prices.csv                    trade on prices of your own
mgt train ppo --env CartPole-v1 --hide 1,3 ...         play, with some observations hidden
"""

from __future__ import annotations

from multi_gpu_training.manager import MultiGPUTrainingManager
from multi_gpu_training.recipes.ppo.options import CONFIG_DEFAULTS, PPOOptions
from multi_gpu_training.recipes.ppo.ppo_trainer import DistributedCLSTMPPOTrainer
from multi_gpu_training.recipes.recipe import Recipe
from multi_gpu_training.training.progress import FitResult

__all__ = ["DistributedCLSTMPPOTrainer", "PPOOptions", "recipe"]


def run(manager: MultiGPUTrainingManager, options: PPOOptions) -> FitResult:
    """PPO keeps its own loop: its data are made by the policy it trains."""
    trainer = DistributedCLSTMPPOTrainer(options=options, manager=manager)
    trainer.initialize()
    return trainer.train()


recipe = Recipe(name="ppo", defaults=CONFIG_DEFAULTS, options=PPOOptions, run=run)
