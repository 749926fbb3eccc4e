"""Drives `llama_loop.py` in its environment: start, one step at a time, stop.

Rounds of a benchmark can so take turns between this process and the peer's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from peers.environments import NotInstalled, last_line, python_of


@dataclass(frozen=True)
class Transformers:
    """What is installed where --peer-python names no Python."""

    environment: str = "transformers"
    package: str = "transformers"
    installs: tuple[tuple[str, ...], ...] = (
        (f"torch=={torch.__version__.partition('+')[0]}", "transformers==5.23.0", "numpy"),
    )


class LlamaLoop:
    """A running peer.

    Attributes:
        memory: peak bytes on its GPU so far, None on a CPU.
    """

    def __init__(self, python: Path, spec: dict[str, Any], batch: Any, folder: Path) -> None:
        """Start it on the ids and labels of `batch`, written to `folder`.

        Raises:
            NotInstalled: it did not start; the text says why.
        """
        self.memory: int | None = None
        files = [folder / "ids.npy", folder / "labels.npy"]
        for path, tensor in zip(files, (batch.input_ids, batch.labels), strict=True):
            np.save(path, tensor.cpu().numpy().astype(np.int64))
        self._errors = (folder / "stderr").open("w+")
        try:
            self._process = subprocess.Popen(
                [str(python), str(Path(__file__).with_name("llama_loop.py")), json.dumps(spec)]
                + [str(path) for path in files],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            )  # fmt: skip
        except OSError as error:
            self._errors.close()
            raise NotInstalled(f"{python}: {error.strerror}") from error
        try:
            self._answer()
        except NotInstalled:
            self.close()
            raise

    def step(self) -> float:
        """Take one step and return its seconds, by the peer's own clock.

        Raises:
            NotInstalled: it failed, such as for want of memory; the text says why.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it ended: its last words are read below
        answer = json.loads(self._answer())
        self.memory = answer["memory"]
        return float(answer["seconds"])

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._errors.close()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise NotInstalled(last_line(self._errors.read()))
        return line


def peer_loop(
    args: argparse.Namespace,
    config: Any,
    world: Any,
    batches: list[Any],
    folder: Path,
) -> LlamaLoop:
    """Start the transformers library's model of the shape of `config`, a `DecoderConfig`.

    Raises:
        NotInstalled: it cannot be started.
    """
    python = args.peer_python or python_of(Transformers(), args.peer_envs)
    spec: dict[str, Any] = {
        "config": {
            "vocab_size": config.vocab_size,
            "hidden_size": config.d_model,
            "intermediate_size": config.feed_forward.width(config),
            "num_hidden_layers": config.n_layers,
            "num_attention_heads": config.n_heads,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_size,
            "max_position_embeddings": args.sequence_length,
            "rms_norm_eps": config.norm.eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.positions.theta},
            "tie_word_embeddings": config.head.tied,
        },
        "parameters": config.num_params,
        "dtype": args.param_dtype,
        "device": str(world.device),
        "compile": args.compile,
        "threads": args.threads,
        "micro_batches": len(batches),
    }
    return LlamaLoop(Path(python), spec, batches[0], folder)
