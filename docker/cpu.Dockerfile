# The command on a CPU, with engine hf. At the root of a clone: docker build -f docker/cpu.Dockerfile -t spec-trainer:cpu .
FROM python:3.12-slim AS wheels
WORKDIR /source
COPY packages packages
COPY apps apps
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels ./packages/* ./apps/*

FROM python:3.12-slim
# torch.compile builds its kernels for CPUs with a C++ compiler.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu
COPY --from=wheels /wheels /wheels
RUN pip install --no-cache-dir --find-links /wheels 'spec-trainer[tensorboard,plots,hub]' 'spec-launcher-ray[ray]'
WORKDIR /trainer
ENTRYPOINT ["spec-trainer"]
