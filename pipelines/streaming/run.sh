#!/usr/bin/env bash
# Tokenises, and trains as the text arrives. Run it again after a kill: both go on where they were.
# Start over with: rm -r pipelines/streaming/out
#   run.sh                        the Python library's source code
#   run.sh --source fineweb-edu   or other inputs and options of olm-data tokenize
set -euo pipefail
cd "$(dirname "$0")"
text=("$@")
if [ $# -eq 0 ]; then text=(--source pylib --subset stdlib); fi
step() { printf '\n\033[1m== %s\033[0m\n' "$*"; }

step "1/4 tokenizer"
if [ -f out/tokenizer.json ]; then
  echo "out/tokenizer.json is there; nothing to do"
else
  olm-data train-tokenizer --source pylib --subset stdlib --vocab-size 4096 \
    --output out/tokenizer.json
fi

step "2/4 text to tokens, beside what follows (out/tokenize.log)"
olm-data tokenize "${text[@]}" --tokenizer out/tokenizer.json --output out/tokens/text \
  --shard-tokens 100000 >out/tokenize.log 2>&1 &
tokenizing=$!
trap 'kill $tokenizing 2>/dev/null || true' EXIT

step "3/4 mix as soon as the first shard is there, and train on two ranks"
olm-data mix mix.yaml --output out/mixture.lock.json
OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" torchrun --nproc-per-node=2 -m olm_train.run train.yaml

step "4/4 the rest of the text, the whole lock, and a look back"
wait $tokenizing || { cat out/tokenize.log >&2; exit 1; }
trap - EXIT
olm-data mix mix.yaml --output out/mixture.lock.json
olm-data verify out/run --lock out/mixture.lock.json
