"""Each metric has its name in one module; nowhere else is it spelled."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from support.sources import modules, together, tree

from olm_data.run_log import metric_names

pytestmark = together

HOME = "olm_data/run_log/metric_names.py"
SPELLED = re.compile(
    r"(train|optim|throughput|experts|spike|system|gap)/[A-Za-z][A-Za-z /-]*\Z"
    r"|CE loss\Z|PPL\Z|BPB\Z"
)


def literals(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of each string in the code of a module; comments and docstrings are none."""
    nodes = list(ast.walk(tree(path)))
    said = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in said:
            yield node.lineno, node.value


def test_metric_names_are_what_runs_have_written_so_far() -> None:
    names = {value for name, value in vars(metric_names).items() if name.isupper()}
    assert names == {
        "train/CE loss", "train/Z loss", "train/tokens", "train/labels", "train/attention pairs",
        "train/sequence length", "train/truncated tokens", "optim/lr",
        "optim/total grad norm", "optim/non-finite",
        "optim/step skipped", "throughput/", "throughput/tokens per second",
        "throughput/seconds per step", "throughput/data wait seconds",
        "throughput/data wait share", "throughput/MFU", "CE loss", "PPL", "BPB", "tokens",
        "optim/gradient noise scale", "optim/gradient signal", "optim/gradient variance",
        "optim/micro-batch norms", "optim/micro-batches", "gap/",
        "spike/SpikeScore", "spike/SpikeScore (total)",
        "system/GPU active mem (GiB)", "system/GPU active mem (%)",
        "system/GPU reserved mem (GiB)", "system/GPU reserved mem (%)",
        "system/GPU memory allocation retries", "system/HF exports failed",
        "acc", "len_norm", "acc_per_token", "acc_uncond", "soft", "soft_log", "questions",
        "left out", "truncated", "ties", "downstream/", "train/instances",
        "throughput/instances per second", "merged/", "watched/step",
        "experts/", "experts/load max over mean", "experts/load entropy",
        "experts/without tokens", "experts/bias norm", "experts/dropped", "train/router Z loss",
    }  # fmt: skip
    assert metric_names.lr_of_group(1) == "optim/lr (group 1)"


def test_no_other_module_spells_the_name_of_a_metric(repository: Path) -> None:
    found = [
        f"{path.relative_to(repository)}:{line}: {text!r}"
        for path in modules()
        if str(path.relative_to(repository)) != HOME
        for line, text in literals(path)
        if SPELLED.match(text)
    ]
    assert found == []
    assert sum(1 for _, text in literals(repository / HOME) if SPELLED.match(text)) >= 12
