# paceline with torch for NVIDIA GPUs, in two stages, without root:
#   docker build -t paceline:0.1.0 .
#   docker run --rm --gpus all --shm-size 8g -v paceline:/workspace paceline:0.1.0 check
# The tag fixes the versions of Python and Debian. To fix the bytes too, replace it by name@sha256:..., which
# `docker buildx imagetools inspect python:3.12.12-slim-bookworm` prints.
FROM python:3.12.12-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv /opt/paceline
# torch alone comes first: its layer is gigabytes, and stays the same while paceline changes
COPY constraints.txt ./
RUN /opt/paceline/bin/pip install -c constraints.txt "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml README.md LICENSE ./
COPY configs ./configs
COPY paceline ./paceline
RUN /opt/paceline/bin/pip install -c constraints.txt '.[datasets]'

FROM python:3.12.12-slim-bookworm
# torch.compile and Triton compile at run time
RUN apt-get update \
    && apt-get install -y --no-install-recommends 'g++=4:12.2.*' \
    && rm -rf /var/lib/apt/lists/*
# 1000 is the user of `paceline emit k8s` too; runs, caches and text are on the volume
RUN useradd --uid 1000 --user-group --no-create-home --home-dir /workspace paceline \
    && install -d -o paceline -g paceline /workspace
COPY --from=build /opt/paceline /opt/paceline
ENV PATH=/opt/paceline/bin:$PATH HOME=/workspace NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000:1000
WORKDIR /workspace
VOLUME /workspace
ENTRYPOINT ["paceline"]
CMD ["--help"]
