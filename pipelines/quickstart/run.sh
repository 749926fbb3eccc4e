#!/usr/bin/env bash
# From the text on this machine to a trained model and a report. Run it again: it continues, or says
# that there is nothing to do. Start over with: rm -r pipelines/quickstart/out
set -euo pipefail
cd "$(dirname "$0")"
started=$SECONDS
step() { printf '\n\033[1m== %s\033[0m\n' "$*"; }

# The tokenizer and the texts are those of the first run: packages installed later do not change it.
step "1/7 tokenizer"
if [ -f out/tokenizer.json ]; then
  echo "out/tokenizer.json is there; nothing to do"
else
  olm-data train-tokenizer --source pylib --subset stdlib --vocab-size 4096 --output out/tokenizer.json
fi

step "2/7 text to tokens"
tokenize() { # name, subset of the source pylib, share held out
  if [ -f "out/tokens/$1/manifest.json" ]; then
    echo "out/tokens/$1 is complete; nothing to do"
  else
    olm-data tokenize --source pylib --subset "$2" --tokenizer out/tokenizer.json \
      --output "out/tokens/$1" --holdout "$3"
  fi
}
tokenize code stdlib 0.01
tokenize docs packages 0.02

step "3/7 verify"
olm-data verify out/tokens/code
olm-data verify out/tokens/docs

step "4/7 mix 80/20"
olm-data mix mix.yaml --output out/mixture.lock.json

step "5/7 train on two ranks"
echo "to see it while it trains: olm-train watch pipelines/quickstart/out/run"
dtype=float32  # without such instructions products in bfloat16 take some fifty times as long
if grep -qsw -e avx512_bf16 -e amx_bf16 -e bf16 /proc/cpuinfo; then dtype=bfloat16; fi
OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" \
  torchrun --nproc-per-node=2 -m olm_train.run train.yaml --train_module.dp_config.param_dtype="$dtype"

step "6/7 sample"
olm-train generate out/run --prompt "def read_file(path):" --max-new-tokens 120 \
  --output out/run/sample.json

step "7/7 report"
olm-data report out/mixture.lock.json --run out/run --output out/report.html
echo
echo "done in $((SECONDS - started)) s; open pipelines/quickstart/out/report.html"
if [ -n "${DISPLAY:-}${WAYLAND_DISPLAY:-}" ] || [ "$(uname)" = Darwin ]; then
  python -m webbrowser "file://$PWD/out/report.html" >/dev/null || true
fi
