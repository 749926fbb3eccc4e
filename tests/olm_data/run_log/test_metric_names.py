"""Each metric has its name in one module; nowhere else is it spelled."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from olm_data.run_log import metric_names

HOME = "olm_data/run_log/metric_names.py"
SPELLED = re.compile(r"(train|optim|throughput)/[A-Za-z][A-Za-z /-]*\Z|CE loss\Z|PPL\Z")


def literals(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of each string in the code of a module; comments and docstrings are none."""
    tree = ast.parse(path.read_text())
    said = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in said:
            yield node.lineno, node.value


def test_metric_names_are_what_runs_have_written_so_far() -> None:
    names = {value for name, value in vars(metric_names).items() if name.isupper()}
    assert names == {
        "train/CE loss", "train/Z loss", "train/tokens", "train/labels", "train/attention pairs",
        "train/sequence length", "optim/lr", "optim/total grad norm", "optim/non-finite",
        "optim/step skipped", "throughput/", "throughput/tokens per second",
        "throughput/seconds per step", "throughput/data wait seconds",
        "throughput/data wait share", "throughput/MFU", "CE loss", "PPL", "tokens",
    }  # fmt: skip
    assert metric_names.lr_of_group(1) == "optim/lr (group 1)"


def test_no_other_module_spells_the_name_of_a_metric(repository: Path) -> None:
    found = [
        f"{path.relative_to(repository)}:{line}: {text!r}"
        for package in ("olm_data", "olm_train")
        for path in sorted((repository / package).rglob("*.py"))
        if str(path.relative_to(repository)) != HOME
        for line, text in literals(path)
        if SPELLED.match(text)
    ]
    assert found == []
    assert sum(1 for _, text in literals(repository / HOME) if SPELLED.match(text)) >= 12
