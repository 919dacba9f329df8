"""Differential privacy: Flower clips every update, adds noise to their mean, and accounts for it.

What is protected is a client: whether it took part at all. Every client has the same weight then,
whatever its number of samples, and a round counts only if all its clients answer: the noise is made
for that many. Sampling a part of the clients is not counted in favour of privacy. Metrics are not
protected.
"""

from __future__ import annotations

from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
)
from flwr.supercore.privacy_accounting import (
    NeighboringRelation,
    PrivacyConfig,
    SamplingMethod,
)
from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant

from multi_gpu_training.federated.federation_settings import FederatedSettings

DPStrategy = (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideFixedClipping,
)


def private_strategy(
    strategy: FedAvg, settings: FederatedSettings
) -> DifferentialPrivacyClientSideFixedClipping | DifferentialPrivacyServerSideFixedClipping:
    """The strategy with clipping, noise and an accountant around it."""
    accountant = RdpAccountant(
        PrivacyConfig(
            target_delta=settings.dp_delta,
            population_size=settings.clients,
            neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
            sampling_method=SamplingMethod.NO_AMPLIFICATION,
            max_epsilon=settings.dp_max_epsilon,
        )
    )
    kind = DPStrategy[settings.dp == "server"]
    return kind(
        strategy,
        noise_multiplier=settings.dp_noise,
        clipping_norm=settings.dp_clip,
        num_sampled_clients=settings.sampled,
        accountant=accountant,
    )
