"""Differential privacy: Flower clips every update, adds noise to their mean, and accounts for it.

What is protected is a client: whether it took part at all. Every client has the same weight then,
whatever its number of samples, and a round counts only if all its clients answer: the noise is made
for that many. Sampling a part of the clients is not counted in favour of privacy. Metrics are not
protected.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from flwr.app import Message
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAvg
from flwr.supercore.differential_privacy import compute_clip_model_update
from flwr.supercore.privacy_accounting import (
    NeighboringRelation,
    PrivacyConfig,
    SamplingMethod,
)
from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant

from multi_gpu_training.errors import ConfigError
from multi_gpu_training.federated.client_run import Weights
from multi_gpu_training.federated.federation_settings import FederatedSettings
from multi_gpu_training.federated.flower_client import CLIPPING, CONFIG

# With either --dp the server clips here, whatever the clients did: Flower's own clipping by the
# server divides by the norm, and an update of a learning rate that begins at 0 has none.
DPStrategy = DifferentialPrivacyClientSideFixedClipping
STATISTICS = ("running_mean", "running_var")


def clip(weights: Weights, old: Weights, norm: float) -> Weights:
    """The weights with an update of this norm at most."""
    found = [weights[name] for name in old]
    before = list(old.values())
    if any(not np.array_equal(mine, other) for mine, other in zip(found, before, strict=True)):
        compute_clip_model_update(found, before, norm)
    return {name: np.asarray(value) for name, value in zip(old, found, strict=True)}


def only_the_server_clips(messages: Iterable[Message]) -> None:
    """Take the norm, with which clients would clip, out of the messages to them."""
    for message in messages:
        message.content.config_records[CONFIG].pop(CLIPPING, None)


def refuse_statistics(names: Iterable[str]) -> None:
    """Raise where noise would fall on statistics: a variance can become negative."""
    found = [name for name in names if name.endswith(STATISTICS)]
    if found:
        raise ConfigError(
            f"--dp adds noise to all that it averages, and {found[0]} is a statistic of BatchNorm, "
            "which does not stand it; use GroupNorm or LayerNorm in the model, or drop --dp"
        )


def private_strategy(
    strategy: FedAvg, settings: FederatedSettings
) -> DifferentialPrivacyClientSideFixedClipping:
    """The strategy with noise and an accountant around it."""
    accountant = RdpAccountant(
        PrivacyConfig(
            target_delta=settings.dp_delta,
            population_size=settings.clients,
            neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
            sampling_method=SamplingMethod.NO_AMPLIFICATION,
            max_epsilon=settings.dp_max_epsilon,
        )
    )
    return DifferentialPrivacyClientSideFixedClipping(
        strategy,
        noise_multiplier=settings.dp_noise,
        clipping_norm=settings.dp_clip,
        num_sampled_clients=settings.sampled,
        accountant=accountant,
    )
