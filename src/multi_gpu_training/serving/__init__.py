"""Serve a trained model over HTTP: `mgt serve RUN`.

batching.py         Batcher: waiting inputs become batches for any predict(list) -> list
http_limits.py      which requests come in: size, rate, host, origin
server_metrics.py   what /metrics tells
request_bodies.py   from the bytes of a request to inputs of the model
web_app.py          the FastAPI app: /, /predict, /health, /metrics
http_server.py      uvicorn, and how it stops without losing an accepted request
"""
