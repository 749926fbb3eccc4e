"""transformers' Trainer as its documentation shows it: a Llama from a configuration, its own loop.

    blocks of 128 tokens -> Trainer(AdamW, cosine, bf16 autocast) -> the model

The options are those of the chapter "Training a causal language model from scratch" of the
library's course (rate 5e-4, cosine, weight decay 0.1, rows of 128 tokens, 32 at a time; its warm-up
of 1,000 steps is longer than these runs, so a tenth of them), and of its page on training on CPUs
(bf16). Tokenizer and shape are ours, so that only the training differs; rate and warm-up are tuned.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

import numpy as np
import torch
from torch import Tensor

from olm_train.model.config import DecoderConfig
from speedruns.budget import TIMED, WARM_UP, Budget, Point, Stopwatch, Tuning, evaluated_steps
from speedruns.text import Source, measure

PUBLISHED = Tuning(rate=5e-4, warmup=0.1)
DECAY, LENGTH, ROWS = 0.1, 128, 32


class NotThere(Exception):
    """transformers, or what its Trainer needs, is not installed; the text says which."""


class Blocks(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Blocks of the sources' tokens, as many of each as its share: `group_texts` of the course."""

    def __init__(self, sources: Sequence[Source], seed: int) -> None:
        cut = [self._cut(source.tokens) for source in sources]
        # The source whose share is used up first decides; Trainer begins again where all are read.
        whole = min(len(rows) / source.share for rows, source in zip(cut, sources, strict=True))
        random = np.random.default_rng(seed)
        self._rows = np.concatenate([
            random.permutation(rows)[: int(whole * source.share)]
            for rows, source in zip(cut, sources, strict=True)
        ])  # fmt: skip

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        ids = torch.from_numpy(self._rows[number].astype(np.int64))
        return {"input_ids": ids, "labels": ids}

    @staticmethod
    def _cut(tokens: np.ndarray) -> np.ndarray:
        return tokens[: len(tokens) // LENGTH * LENGTH].reshape(-1, LENGTH)


def llama(shape: DecoderConfig) -> Any:
    """Return the library's Llama of our shape, its weights drawn by the library."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.d_model,
            intermediate_size=shape.feed_forward.width(shape),
            num_hidden_layers=shape.n_layers,
            num_attention_heads=shape.n_heads,
            num_key_value_heads=shape.kv_heads,
            max_position_embeddings=max(LENGTH, 1024),
            tie_word_embeddings=shape.head.tied,
        )
    )


def train(
    shape: DecoderConfig,
    sources: Sequence[Source],
    budget: Budget,
    tuning: Tuning = PUBLISHED,
    *,
    seed: int,
    points: int = 1,
    device: torch.device | None = None,
) -> list[Point]:
    """Train for the budget; return what was measured at its points.

    Raises:
        NotThere: the library is not installed.
    """
    try:
        import accelerate  # noqa: F401  (Trainer wants it)
        from transformers import Trainer, TrainerCallback, TrainingArguments
    except ImportError as error:
        raise NotThere(f"{error.name} is not installed: pip install transformers accelerate") from (
            error
        )
    device = device or torch.device("cpu")
    data = Blocks(sources, seed)
    held_out = {source.name: source.held_out_tokens for source in sources}

    class Times(TrainerCallback):
        """The time of each step, and evaluations outside of it."""

        def __init__(self, wanted: set[int]) -> None:
            self.wanted, self.watch = wanted, Stopwatch(budget)
            self.steps: list[float] = []
            self.found: list[Point] = []

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.watch.start()

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._begun = budget.now()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.steps.append(budget.now() - self._begun)
            step = int(state.global_step)
            if step not in self.wanted:
                return
            self.watch.stop()
            model = kwargs["model"].eval()
            bits = {
                source.name: measure(
                    lambda ids: model(input_ids=ids).logits,
                    held_out[source.name], source.sizes, LENGTH, device,
                )
                for source in sources
            }  # fmt: skip
            model.train()
            seen = step * ROWS * LENGTH
            self.found.append(Point(step, seen, self.watch.wall, self.watch.used, bits))
            self.watch.start()

    def run(steps: int, times: Times) -> Times:
        torch.manual_seed(seed)
        # Trainer prints its own summary
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
            arguments = TrainingArguments(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=ROWS,
                learning_rate=tuning.rate,
                weight_decay=DECAY,
                lr_scheduler_type="cosine",
                warmup_steps=round(tuning.warmup * steps),
                bf16=True,
                use_cpu=device.type == "cpu",
                seed=seed,
                save_strategy="no",
                logging_strategy="no",
                report_to="none",
                disable_tqdm=True,
            )
            Trainer(
                model=llama(shape), args=arguments, train_dataset=data, callbacks=[times]
            ).train()
        return times

    steps = budget.fixed_steps or budget.steps(run(WARM_UP + TIMED, Times(set())).steps)
    return run(steps, Times(evaluated_steps(steps, points))).found
