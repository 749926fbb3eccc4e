"""Names of the metrics of a step and of an evaluation: in the log, on trackers, to callbacks.

`train/` is what the loss saw, `optim/` what the optimiser did, `throughput/` what the clock
says, `system/` what the machine does, `experts/` who gets the tokens, `spike/` how calm the run is,
`gap/` what tensors look like.
"""

from __future__ import annotations

from collections.abc import Collection

CE_LOSS = "train/CE loss"
"""Nats a label, mean over the global batch."""
Z_LOSS = "train/Z loss"
"""Multiplied, as it is in the sum that is minimised."""
TOKENS = "train/tokens"
"""Tokens of the global batch, counted on the devices."""
INSTANCES = "train/instances"
"""Of the global batch, where it is not made of tokens."""
LABELS = "train/labels"
"""Those among them that count in the loss."""
ATTENTION_PAIRS = "train/attention pairs"
"""Queries times the keys that each sees, mean over layers."""
SEQUENCE_LENGTH = "train/sequence length"
"""Tokens of a row."""
TRUNCATED = "train/truncated tokens"
"""Of the global batch, which a warm-up of the sequence length left out."""

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
INSTANCES_PER_SECOND = THROUGHPUT + "instances per second"
"""Where the data loader counts instances, not tokens."""
SECONDS_PER_STEP = THROUGHPUT + "seconds per step"
DATA_WAIT_SECONDS = THROUGHPUT + "data wait seconds"
DATA_WAIT_SHARE = THROUGHPUT + "data wait share"
MFU = THROUGHPUT + "MFU"
"""Model FLOP/s over the peak of the devices."""

EXPERTS = "experts/"
"""What the names of the following begin with."""
LOAD_MAX = EXPERTS + "load max over mean"
"""Tokens of the busiest expert over those of the mean one, in the layer where that is the most; 1:
all have the same. Tokens with a label, of the global batch."""
LOAD_ENTROPY = EXPERTS + "load entropy"
"""Of the shares of the experts over the most it can be, mean over the layers; 1: all have the
same."""
DEAD_EXPERTS = EXPERTS + "without tokens"
"""In all layers."""
DROPPED = EXPERTS + "dropped"
"""Share of the choices of experts that were beyond their capacity."""
ROUTER_BIAS = EXPERTS + "bias norm"
"""Of the biases of all routers, after the step."""
ROUTER_Z_LOSS = "train/router Z loss"
"""Multiplied, as Z_LOSS is."""

SPIKE_SCORE = "spike/SpikeScore"
"""Share of the last steps, as many as the monitor's rolling window has, that were spikes."""
SPIKE_SCORE_TOTAL = "spike/SpikeScore (total)"
"""Share of all steps so far."""

GAP = "gap/"
"""What the names of `statistic_of` begin with."""
NOISE_SCALE = "optim/gradient noise scale"
"""Labels; a global batch of so many has as much noise as signal in its gradient."""
NOISE_SIGNAL = "optim/gradient signal"
"""Estimate of the squared norm of the true gradient, smoothed."""
NOISE_VARIANCE = "optim/gradient variance"
"""Estimate of the trace of the covariance of one label's gradient, smoothed."""
MICRO_NORMS = "optim/micro-batch norms"
"""Sum over micro-batches of the squared norm of each one's gradient over its labels; not logged."""
MICRO_BATCHES = "optim/micro-batches"
"""Those with labels; not logged."""

GPU_ACTIVE_GIB = "system/GPU active mem (GiB)"
"""What tensors took at most in a step, on the rank with the most."""
GPU_ACTIVE_PERCENT = "system/GPU active mem (%)"
GPU_RESERVED_GIB = "system/GPU reserved mem (GiB)"
"""What the allocator held."""
GPU_RESERVED_PERCENT = "system/GPU reserved mem (%)"
GPU_ALLOC_RETRIES = "system/GPU memory allocation retries"
"""So far; each one means that memory ran out and was given back."""

HF_EXPORT_FAILURES = "system/HF exports failed"
"""So far; recorded when one fails."""

EVAL_CE_LOSS = "CE loss"
"""Of a held-out dataset: nats a label."""
EVAL_PERPLEXITY = "PPL"
EVAL_BPB = "BPB"
"""Bits per byte of the text: nats / ln 2 / bytes, the first token of a document after BOS or EOS;
comparable over tokenizers."""
EVAL_TOKENS = "tokens"
"""Labels that the loss is the mean of."""
EVAL_ACC = "acc"
"""Of a downstream task: share of questions whose right choice has the largest log-probability."""
EVAL_LEN_NORM = "len_norm"
"""The same by log-probability a character of the continuation."""
EVAL_PER_TOKEN = "acc_per_token"
EVAL_UNCOND = "acc_uncond"
"""The same by log-probability less that after a context that asks nothing."""
EVAL_SOFT = "soft"
"""Probability of the right choice among the choices."""
EVAL_SOFT_LOG = "soft_log"
EVAL_QUESTIONS = "questions"
"""Those that count."""
EVAL_LEFT_OUT = "left out"
"""Questions with a continuation that is longer than a row, or with a log-probability that is no
number."""
EVAL_TRUNCATED = "truncated"
"""Requests whose context lost its beginning, as they are longer than a row."""
EVAL_TIES = "ties"
"""Questions in which several choices are the best; the first of them is taken."""
EVAL_TASK = "downstream/"
"""What the names of downstream tasks begin with, among those of held-out datasets."""
EVAL_MERGED = "merged/"
"""What the names of datasets begin with where averaged weights were evaluated on them."""


WATCHED_STEP = "watched/step"
"""Step of the checkpoint, where an evaluation made beside the run came with a later row."""


def of_balance(name: str) -> str:
    """Return the name of a balance loss of experts, by its kind; multiplied, as Z_LOSS is."""
    return f"train/{name} balance loss"


def of_watched(dataset: str, metric: str) -> str:
    """Return what trackers call a metric of an evaluation made beside the run."""
    return f"watched/{dataset}/{metric}"


def of_evaluation(dataset: str, metric: str) -> str:
    """Return what trackers call a metric of a held-out dataset: `eval/web/CE loss`."""
    return f"eval/{dataset}/{metric}"


def of_averaged(dataset: str, suffix: str) -> str:
    """Return the name of a dataset that averaged weights were evaluated on.

    Args:
        suffix: of the folders of such weights, `merged` or one that was chosen.
    """
    prefix = EVAL_MERGED if f"{suffix}/" == EVAL_MERGED else f"{EVAL_MERGED}{suffix}/"
    return f"{prefix}{dataset}"


def of_group(metric: str, way: str, group: str) -> str:
    """Return the name of a metric of some labels: `BPB/language=de`, `CE loss/position=0-63`.

    Args:
        way: what the labels are grouped by.
        group: value of a column, or range of tokens.
    """
    return f"{metric}/{way}={group}"


def group_of(name: str) -> tuple[str, str, str] | None:
    """Return (metric, way, group) of a name that `of_group` made; None: it is of all labels."""
    metric, slash, rest = name.partition("/")
    way, equals, group = rest.partition("=")
    known = metric in (EVAL_CE_LOSS, EVAL_BPB, EVAL_TOKENS)
    return (metric, way, group) if slash and equals and known else None


def stderr_of(metric: str) -> str:
    """Return the name of the standard error of a metric over questions."""
    return f"{metric} stderr"


def change_of(metric: str) -> str:
    """Return the name of the difference of a metric to the evaluation before, question by question.

    Its standard error is `stderr_of` this.
    """
    return f"{metric} change"


def primary_of(metrics: Collection[str]) -> str | None:
    """Return the metric that a task is judged by, of the names of its metrics: it alone has a
    standard error; None: they are of no task."""
    found = (name for name in metrics if stderr_of(name) in metrics)
    return next((name for name in found if not name.endswith(change_of(""))), None)


def per_second(unit: str) -> str:
    """Return the name of the throughput of a run that counts "tokens" or "instances"."""
    return TOKENS_PER_SECOND if unit == "tokens" else INSTANCES_PER_SECOND


def lr_of_group(number: int) -> str:
    """Return the name of the learning rate of one group of parameters, counted from 0."""
    return f"{LR} (group {number})"


def statistic_of(target: str, name: str, kind: str) -> str:
    """Return the name of a statistic of a tensor, `gap/grads/blocks.0.attention.w_out.weight/max`.

    Args:
        target: params, grads, updates, opt_state, activations or activation_grads.
        name: of a parameter or module.
        kind: max, mean, var, ...
    """
    return f"{GAP}{target}/{name}/{kind}"
