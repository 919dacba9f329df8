"""Federated training on Flower: every client is one of our runs, on as many GPUs as it has.

federation_settings what the federation does: rounds, strategy, privacy
client_run          one round on one client: an ordinary run that takes the server's weights
flower_client       the ClientApp: messages in, rounds out
flower_server       the ServerApp: sampling, aggregation, checkpoints, which replies count
secure_aggregation  Flower's SecAgg+ around a round: the server sees only the sum
privacy             Flower's clipping and noise, and what they cost
simulation          all clients on this machine, with Flower's simulation engine
deployment          SuperLink and SuperNode with TLS and authenticated clients
rounds_report       the HTML page of rounds, clients, drift and bytes
"""
