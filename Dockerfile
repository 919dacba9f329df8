# docker build -t multi-gpu-training .                       CUDA, for GPUs
# docker build -t multi-gpu-training:cpu --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
# docker run --rm --gpus all --shm-size 8g -v "$PWD/runs:/work/runs" multi-gpu-training train image
FROM python:3.12-slim-bookworm

# PyPI's own wheels bring their CUDA libraries: the host needs a driver, the image no CUDA.
ARG TORCH_INDEX=https://pypi.org/simple
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src ./src
RUN pip install --extra-index-url "$TORCH_INDEX" -c constraints.txt '.[recipes]' \
    && useradd --create-home --uid 1000 trainer \
    && install -d -o trainer /work

USER 1000
WORKDIR /work
# Signals must reach the launcher: it saves before it ends.
STOPSIGNAL SIGTERM
ENTRYPOINT ["mgt"]
CMD ["--help"]
