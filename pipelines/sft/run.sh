#!/usr/bin/env bash
# From the quickstart's model to one that answers. Run it again: it continues, or says that there is
# nothing to do. Start over with: rm -r pipelines/sft/out
set -euo pipefail
cd "$(dirname "$0")"
base=../quickstart/out
if [ ! -f "$base/mixture.lock.json" ] || [ ! -d "$base/run" ]; then
  echo "no model to begin with in pipelines/quickstart/out: run make demo first" >&2
  exit 2
fi
step() { printf '\n\033[1m== %s\033[0m\n' "$*"; }

step "1/4 conversations to tokens"
if [ -f out/tokens/chats/manifest.json ]; then
  echo "out/tokens/chats is complete; nothing to do"
else
  [ -f out/chats.jsonl ] || python chats.py out/chats.jsonl
  olm-data tokenize out/chats.jsonl --format chat --chat-template tulu \
    --tokenizer "$base/tokenizer.json" --output out/tokens/chats --holdout 0.05 \
    --max-tokens 256 --max-bad 1%
fi

step "2/4 mix 90/10"
olm-data mix mix.yaml --output out/mixture.lock.json

step "3/4 train on two ranks"
dtype=float32  # without such instructions products in bfloat16 take some fifty times as long
if grep -qsw -e avx512_bf16 -e amx_bf16 -e bf16 /proc/cpuinfo; then dtype=bfloat16; fi
OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" \
  torchrun --nproc-per-node=2 -m olm_train.run train.yaml --train_module.dp_config.param_dtype="$dtype"

step "4/4 ask"
olm-train generate out/run --stop '<|endoftext|>' --max-new-tokens 60 --temperature 0 \
  --prompt $'<|user|>\nWhat does os.getcwd do?\n<|assistant|>\n'
