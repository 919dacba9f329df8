"""PPO on a GPU: the numbers of the CPU, and a whole run without leaving the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from multi_gpu_training import MultiGPUConfig
from multi_gpu_training.recipes.ppo import DistributedCLSTMPPOTrainer, PPOOptions
from multi_gpu_training.recipes.ppo.policy import Actions, CLSTMPolicy, Stepper

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("window", [1, 4])
def test_the_gpu_computes_what_the_cpu_computes(window: int) -> None:
    torch.manual_seed(0)
    policy = CLSTMPolicy(3, Actions("discrete", 2), window, features=8, hidden=16).double()
    batch = (
        torch.randn(5, 7, 3).double(),
        torch.randn(5, window - 1, 3).double(),
        torch.randn(5, 4, 16).double(),
        torch.rand(5, 7) < 0.3,
    )
    batch[3][:, 0] = False  # what is remembered at the first step counts
    with torch.no_grad():
        here = policy(*batch, whole=False)
        there = policy.cuda()(*(part.cuda() for part in batch), whole=False)
        step = Stepper(policy)
        state = batch[2].view(5, 2, 2, 16).permute(2, 1, 0, 3).cuda()
        windows = torch.cat([batch[1], batch[0][:, :1]], 1).cuda()
        first, _ = step(windows, state)
    torch.testing.assert_close(there.head.cpu(), here.head, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(there.values.cpu(), here.values, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(first.values.cpu(), here.values[:, 0], rtol=1e-9, atol=1e-9)


def test_trading_trains_on_the_gpu(tmp_path: Path) -> None:
    config = MultiGPUConfig(
        training_mode="single",
        device="cuda",
        progress="off",
        tensorboard=False,
        save_dir=str(tmp_path),
        recipe="ppo",
        batch_size=8,
        epochs=2,
        max_grad_norm=0.5,
    )
    options = PPOOptions(
        num_envs=16,
        num_episodes=32,
        assets=3,
        market_days=400,
        episode_days=20,
        window=3,
        features=16,
        hidden=16,
    )
    trainer = DistributedCLSTMPPOTrainer(config, options)
    result = trainer.train()
    assert trainer.progress.episodes == 32
    assert trainer.collector.state.is_cuda
    assert all(torch.isfinite(p).all() for p in trainer.policy.parameters())
    assert "test_return" in result.metrics
