# Kimi-K3 on eight MI355X: ROCm 7.14, Python 3.12, JAX 0.12. See docs/rocm.md for what each line is for, and for ROCm 7.0 - 7.2.
#
#   docker build -f docs/rocm.Dockerfile -t kimi-jax .
#   docker run --rm -it --device /dev/kfd --device /dev/dri --group-add video --group-add render --security-opt seccomp=unconfined \
#       --shm-size 64g -v /data:/data kimi-jax doctor --platform rocm --model /data/Kimi-K3
#
# Not yet built or run on a machine with a GPU.
FROM ubuntu:24.04

RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv gcc ca-certificates \
    && rm -rf /var/lib/apt/lists/*
ENV VIRTUAL_ENV=/opt/kimi PATH=/opt/kimi/bin:$PATH
RUN python3 -m venv /opt/kimi

# The ROCm libraries as Python packages: the plugin looks for them beside itself, so no LD_LIBRARY_PATH is needed.
RUN pip install --no-cache-dir --index-url https://repo.amd.com/rocm/whl-multi-arch/ "rocm[libraries,device-gfx950]==7.14.0"

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY kimi_jax kimi_jax
COPY sharding sharding
RUN pip install --no-cache-dir ".[rocm]"

ENV AMD_COMGR_NAMESPACE=1 \
    XLA_FLAGS=--xla_gpu_enable_command_buffer= \
    HIP_FORCE_DEV_KERNARG=1 \
    XLA_CLIENT_MEM_FRACTION=0.93
WORKDIR /
ENTRYPOINT ["kimi-jax"]
