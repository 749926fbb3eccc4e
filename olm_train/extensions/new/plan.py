"""Sizes, rate, batch and tokens of a run, from the text that is there and the machine: pure.

bytes, preset or none, Gpu or none -> vocabulary -> tokens -> shape -> row, batch, rate -> Plan
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from olm_train.estimate.gpus import Gpu
from olm_train.extensions.presets.recipe import PresetOptions, recipe
from olm_train.model.config import DecoderConfig
from olm_train.model.presets import PRESETS, preset

ENOUGH = 20
"""Tokens for each parameter (Hoffmann et al., 2022)."""
MOST_EPOCHS = 4
"""Repeated so often, text is nearly as good as new (Muennighoff et al., 2023)."""
VOCABULARIES = ((10**7, 2048, 2.8), (10**9, 8192, 3.5), (10**11, 32_768, 4.2), (inf, 65_536, 4.5))
"""Text of fewer bytes -> entries, and bytes a token, about, for prose of one language."""
ON_A_CPU = "olm-4m"
"""The largest shape that is chosen where there is no GPU."""
SMALLEST_ROW = 64
HELD_OUT = 2_000_000
"""Bytes of text to hold out: some half a million tokens, enough for three digits of a loss."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What a run on a text would be.

    Attributes:
        preset: its name; `chosen`: it follows from the text.
        vocab_size: entries; of the text itself, if it gives as many.
        bytes_a_token: assumed.
        tokens: of the text, estimated.
        epochs: how often the text is gone through, in hundredths.
        row: tokens of a row.
        batch: tokens of a step; `microbatch`: of a rank at once.
        lr: peak rate of AdamW; `beta2` its second decay.
        holdout: share of documents to hold out.
        recipe: options for the GPU; None: no GPU.
    """

    preset: str
    chosen: bool
    vocab_size: int
    bytes_a_token: float
    tokens: int
    epochs: float
    row: int
    batch: int
    microbatch: int
    lr: float
    beta2: float
    holdout: float
    recipe: PresetOptions | None

    @property
    def model(self) -> DecoderConfig:
        """The shape, with its vocabulary."""
        return preset(self.preset, vocab_size=self.vocab_size)

    @property
    def trained(self) -> int:
        """Tokens of the run."""
        return round(self.tokens * self.epochs)

    @property
    def share(self) -> float:
        """Tokens of the run for each parameter."""
        return self.trained / self.model.num_params

    @property
    def why(self) -> str:
        """Why it is this shape."""
        if not self.chosen:
            return "as asked for"
        if MOST_EPOCHS * self.tokens < ENOUGH * self.model.num_params:
            return "our smallest; more text would be better"
        if self.recipe is None and self.preset == ON_A_CPU:
            return "our largest for a CPU"
        return "the largest for which the text is enough"


def plan(size: int, name: str | None, gpu: Gpu | None) -> RunPlan:
    """Return the plan for `size` bytes of text, a preset or the best one, a GPU or none."""
    vocab_size, bytes_a_token = next((v, b) for most, v, b in VOCABULARIES if size < most)
    tokens = max(int(size / bytes_a_token), 1)
    chosen = name or _best(tokens, vocab_size, gpu)
    model = preset(chosen, vocab_size=vocab_size)
    epochs = max(round(min(MOST_EPOCHS, ENOUGH * model.num_params / tokens), 2), 0.01)
    trained = int(tokens * epochs)
    longest = PRESETS[chosen].sequence_length
    row = max(_power_of_two(min(longest, tokens // 1000)), SMALLEST_ROW)
    found = recipe(chosen, gpu) if gpu else None
    ranks = found.gpus if found else 1
    # Step Law (arXiv 2503.04715): 0.58 D^0.571 tokens, here as whole rows of every rank.
    rows = max(_power_of_two(int(0.58 * trained**0.571) // (row * ranks)), 1)
    fits = found.module.rank_microbatch_size // row if found else max(2048 // row, 1)
    batch = rows * row * ranks
    return RunPlan(
        preset=chosen,
        chosen=name is None,
        vocab_size=vocab_size,
        bytes_a_token=bytes_a_token,
        tokens=tokens,
        epochs=epochs,
        row=row,
        batch=batch,
        microbatch=min(rows, _power_of_two(max(fits, 1))) * row,
        # OLMo-core's ladder: 0.0047 (N / 108e6)^(-1/3) / 2; small models take no more than 3e-3.
        lr=float(
            f"{min(0.00235 * (model.num_non_embedding_params / 108e6) ** (-1 / 3), 3e-3):.2g}"
        ),
        beta2=0.95 if batch >= 2**19 else 0.99,
        holdout=float(f"{min(0.2, HELD_OUT / max(size, 1)):.2g}"),
        recipe=found,
    )


def _best(tokens: int, vocab_size: int, gpu: Gpu | None) -> str:
    """Return the largest of our shapes for which the text is enough, gone through four times."""
    ours = [name for name in PRESETS if name.startswith("olm-") and "moe" not in name]
    if gpu is None:
        ours = ours[: ours.index(ON_A_CPU) + 1]
    fitting = [
        name
        for name in ours
        if ENOUGH * preset(name, vocab_size=vocab_size).num_params <= MOST_EPOCHS * tokens
    ]
    return (fitting or ours[:1])[-1]


def _power_of_two(number: int) -> int:
    """Return the largest power of two that is not above `number`; 0 for 0."""
    return 1 << number.bit_length() - 1 if number > 0 else 0
