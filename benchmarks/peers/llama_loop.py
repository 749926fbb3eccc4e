"""The transformers library's Llama in a plain training loop, steps on request.

    python llama_loop.py '{"config": {...}, "dtype": "float32", ...}' IDS.npy LABELS.npy
    stdin: a line -> one step -> stdout: its seconds and the peak memory so far, as JSON

Runs in the peer's own environment, so it imports torch, numpy and transformers and nothing of ours.
The loop is that of the plain GPT in `bench_train_step.py`: fp32 weights, autocast, causal attention
(sdpa) without documents, mean cross entropy, clipping, fused AdamW.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    spec: dict[str, Any] = json.loads(sys.argv[1])
    if spec["threads"]:
        torch.set_num_threads(spec["threads"])
    device = torch.device(spec["device"])
    arrays = [np.load(path, allow_pickle=False) for path in sys.argv[2:4]]
    ids, labels = (torch.from_numpy(array).to(device) for array in arrays)
    torch.manual_seed(0)
    config = LlamaConfig(**spec["config"], use_cache=False, attn_implementation="sdpa")
    model = LlamaForCausalLM(config).to(device).train()
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters == spec["parameters"], (parameters, spec["parameters"])
    if spec["compile"]:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    dtype = getattr(torch, spec["dtype"])
    print("ready", flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        for _ in range(spec["micro_batches"]):
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                logits = model(input_ids=ids).logits
                loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
            (loss / spec["micro_batches"]).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert norm.isfinite()
        optimizer.step()
        optimizer.zero_grad()
        memory = None
        if device.type == "cuda":
            torch.cuda.synchronize()
            memory = torch.cuda.max_memory_allocated()
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "memory": memory}), flush=True)


if __name__ == "__main__":
    main()
