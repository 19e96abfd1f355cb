#!/usr/bin/env bash
# Trains on several machines without a scheduler: run it on every one of them.
#   HEAD=node0 NODES=2 GPUS=8 ./torchrun.sh RUN.yaml
# The mesh in RUN.yaml must multiply to NODES * GPUS, and all machines must see train.dir. When a
# rank dies, every agent starts its ranks anew, and they go on from the newest checkpoint. When a
# machine is lost, start this script again on all of them: the run goes on likewise.
set -euo pipefail

exec torchrun \
  --nnodes="${NODES:?number of machines}" \
  --nproc-per-node="${GPUS:?ranks on each machine}" \
  --rdzv-backend=c10d \
  --rdzv-endpoint="${HEAD:?host name of one of them}:${PORT:-29500}" \
  --rdzv-id="${JOB:-paralign}" \
  --max-restarts="${RESTARTS:-10}" \
  -m paralign train "${1:?a RUN.yaml}"
