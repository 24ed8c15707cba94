# The command on NVIDIA GPUs, with engine vllm. At the root of a clone:
#   docker build -f docker/cuda-vllm.Dockerfile -t spec-trainer:cuda-vllm .
FROM python:3.12-slim AS wheels
WORKDIR /source
COPY packages packages
COPY apps apps
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels ./packages/* ./apps/*

# vLLM's own image has vLLM and the torch that it was built for.
FROM vllm/vllm-openai:v0.33.0
COPY --from=wheels /wheels /wheels
RUN python3 -m pip install --no-cache-dir --find-links /wheels \
    'spec-trainer[cuda,vllm,tensorboard,plots,hub]' 'spec-launcher-ray[ray]'
WORKDIR /trainer
ENTRYPOINT ["spec-trainer"]
