"""A second reader with code of its own, mlx-lm, computes what the checkpoint does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.hf_exports import OLMO2, OLMOE, QWEN3_MOE, trained
from support.runs import environment

from olm_train.checkpoint.portable import evaluation_model
from olm_train.extensions.hf_export.export import export
from olm_train.extensions.hf_export.job import ExportOptions

pytestmark = [
    pytest.mark.slow,  # a process that imports mlx
    pytest.mark.skipif(sys.platform != "linux", reason="mlx computes on the CPU under Linux"),
]
READ = """
import json, sys
import mlx.core as mx
from mlx_lm.utils import load
model, tokenizer = load(sys.argv[1])
ids = json.loads(sys.argv[2])
greedy = list(ids)
for _ in range(12):
    greedy.append(int(mx.argmax(model(mx.array([greedy]))[0, -1])))
print(json.dumps({
    "logits": model(mx.array([ids]))[0].astype(mx.float32).tolist(),
    "greedy": greedy, "text": tokenizer.decode(ids), "ends": sorted(tokenizer.eos_token_ids),
}))
"""
LLAMA3 = (
    "d_model: 32, n_layers: 2, n_heads: 4, n_kv_heads: 2, feed_forward: {hidden_size: 48}, "
    "head: {tied: true}, "
    "positions: {name: rope, scaling: {name: llama3, factor: 4, old_context_len: 16}}"
)


GPT2 = (
    "d_model: 32, n_layers: 2, n_heads: 4, head: {tied: true}, attention: {bias: all}, "
    "positions: {name: learned, max_positions: 64}, norm: {name: layer_norm, bias: true}, "
    "feed_forward: {name: gelu, hidden_size: 128, bias: true}"
)


MODELS = {
    "OLMo 2": OLMO2, "Llama 3, tied": LLAMA3, "GPT-2": GPT2,
    "OLMoE": OLMOE, "Qwen 3 MoE": QWEN3_MOE,
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_mlx_computes_the_same(tiny_mixture: Path, tmp_path: Path, model: str) -> None:
    checkpoint = trained(tiny_mixture, tmp_path / "run", model)
    export(checkpoint, str(tmp_path / "hf"), ExportOptions(dtype="float32", check="files"))
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(512, (1, 50), generator=generator)
    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path / "hf"), json.dumps(ids[0].tolist())],
        env=environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    ours = evaluation_model(checkpoint)
    with torch.no_grad():
        difference = (torch.tensor(found["logits"]) - ours(ids)[0]).abs().max()
        greedy = ids
        for _ in range(12):
            greedy = torch.cat((greedy, ours(greedy)[:, -1:].argmax(-1)), dim=1)
    assert difference <= 1e-4
    assert found["greedy"] == greedy[0].tolist()
    assert found["ends"] == [0]
