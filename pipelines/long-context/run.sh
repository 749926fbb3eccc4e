#!/usr/bin/env bash
# A third stage of the quickstart's model: longer rows. Run it again: it continues, or says that there
# is nothing to do. Start over with: rm -r pipelines/long-context/out
set -euo pipefail
cd "$(dirname "$0")"
tokenizer=../quickstart/out/tokenizer.json
if [ ! -d ../midtrain/out/run ]; then
  echo "no model to begin with in pipelines/midtrain/out: run pipelines/midtrain/run.sh first" >&2
  exit 2
fi
step() { printf '\n\033[1m== %s\033[0m\n' "$*"; }

step "1/3 needles"
for tokens in 200 900; do
  name=needle-$tokens
  if [ -d "out/evals/$name" ]; then
    echo "out/evals/$name is complete; nothing to do"
  else
    python needle.py "$tokenizer" "$tokens" "out/$name.jsonl"
    olm-data eval-set build "out/$name.jsonl" --tokenizer "$tokenizer" --output "out/evals/$name"
  fi
done

step "2/3 mix by length"
olm-data mix mix.yaml --output out/mixture.lock.json

step "3/3 train on two ranks"
OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" \
  torchrun --nproc-per-node=2 -m olm_train.run train.yaml
