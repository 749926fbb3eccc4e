#!/usr/bin/env bash
# A second stage of the quickstart's model on another mixture. Run it again: it continues, or says that
# there is nothing to do. Start over with: rm -r pipelines/midtrain/out
set -euo pipefail
cd "$(dirname "$0")"
base=../quickstart/out
if [ ! -f "$base/mixture.lock.json" ] || [ ! -d "$base/run" ]; then
  echo "no model to begin with in pipelines/quickstart/out: run make demo first" >&2
  exit 2
fi
step() { printf '\n\033[1m== %s\033[0m\n' "$*"; }

step "1/2 mix 40/60"
olm-data mix mix.yaml --output out/mixture.lock.json

step "2/2 train on two ranks"
OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" \
  torchrun --nproc-per-node=2 -m olm_train.run train.yaml
