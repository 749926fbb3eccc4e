"""Names of the metrics of a step and of an evaluation: in the log, on trackers, to callbacks.

`train/` is what the loss saw, `optim/` what the optimiser did, `throughput/` what the clock says.
"""

from __future__ import annotations

CE_LOSS = "train/CE loss"
"""Nats a label, mean over the global batch."""
Z_LOSS = "train/Z loss"
"""Multiplied, as it is in the sum that is minimised."""
TOKENS = "train/tokens"
"""Tokens of the global batch, counted on the devices."""
LABELS = "train/labels"
"""Those among them that count in the loss."""
ATTENTION_PAIRS = "train/attention pairs"
"""Queries times the keys that each sees, mean over layers."""
SEQUENCE_LENGTH = "train/sequence length"
"""Tokens of a row."""

LR = "optim/lr"
GRAD_NORM = "optim/total grad norm"
"""Before clipping."""
NON_FINITE = "optim/non-finite"
"""1 where loss or gradient norm is NaN or infinite; not logged, see STEP_SKIPPED."""
STEP_SKIPPED = "optim/step skipped"
"""1 where the weights stayed as they were and the run went on."""

THROUGHPUT = "throughput/"
"""What the names of the following begin with."""
TOKENS_PER_SECOND = THROUGHPUT + "tokens per second"
SECONDS_PER_STEP = THROUGHPUT + "seconds per step"
DATA_WAIT_SECONDS = THROUGHPUT + "data wait seconds"
DATA_WAIT_SHARE = THROUGHPUT + "data wait share"
MFU = THROUGHPUT + "MFU"
"""Model FLOP/s over the peak of the devices."""

EVAL_CE_LOSS = "CE loss"
"""Of a held-out dataset: nats a label."""
EVAL_PERPLEXITY = "PPL"
EVAL_TOKENS = "tokens"
"""Labels that the loss is the mean of."""


def lr_of_group(number: int) -> str:
    """Return the name of the learning rate of one group of parameters, counted from 0."""
    return f"{LR} (group {number})"
