#!/usr/bin/env bash
# Trains on several machines without a scheduler: run it on every one of them.
#   HEAD=node0 NODES=2 GPUS=8 ./torchrun.sh RUN.yaml
# The mesh in RUN.yaml must multiply to NODES * GPUS, and all machines must see train.dir. When a
# rank dies, every agent starts its ranks anew, and they go on from the newest checkpoint.
# With NODES=1:2 and `mesh: {dp_shard: auto}` the run also goes on when a machine is lost, with the
# ranks that are left. HEAD must not be the one that is lost. To use a machine that has come back,
# stop the run (SIGTERM saves) and start the script again on all of them.
set -euo pipefail

exec torchrun \
  --nnodes="${NODES:?number of machines, or the least and the most of them as 1:2}" \
  --nproc-per-node="${GPUS:?ranks on each machine}" \
  --rdzv-backend=c10d \
  --rdzv-endpoint="${HEAD:?host name of one of them}:${PORT:-29500}" \
  --rdzv-id="${JOB:-paralign}" \
  --max-restarts="${RESTARTS:-10}" \
  -m paralign train "${1:?a RUN.yaml}"
