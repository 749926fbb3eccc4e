"""Promises about what importing costs and which way the arrows run."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

from support.sources import modules, together, tree

pytestmark = together


def test_olm_data_loads_neither_torch_nor_arrow_nor_olm_train(repository: Path) -> None:
    code = "import sys, olm_data; print(sorted({'torch', 'pyarrow', 'numpy'} & set(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"


def test_no_module_of_olm_data_imports_torch_or_olm_train() -> None:
    for path in modules("olm_data"):
        for node in ast.walk(tree(path)):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            roots = {name.split(".")[0] for name in names}
            assert not roots & {"torch", "olm_train"}, f"{path} imports {roots}"


def test_the_pure_layer_does_no_input_or_output(repository: Path) -> None:
    package = repository / "olm_data"
    pure = [
        package / "dataset/plan.py",
        package / "packing/concat.py",
        package / "packing/document.py",
        package / "packing/best_fit.py",
    ]
    for path in (*pure, *sorted((package / "order").glob("*.py"))):
        nodes = list(ast.walk(tree(path)))
        calls = {
            n.func.id for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
        }
        named = {n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)}
        named |= {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
        assert "open" not in calls
        assert not {m.split(".")[0] for m in named} & {"os", "pathlib", "time", "fsspec", "random"}


def test_configurations_are_read_by_olm_data_config_alone(repository: Path) -> None:
    readers = {
        path.name
        for path in (repository / "olm_train").rglob("*.py")
        if re.search(r"strict_yaml|yaml\.(safe_)?load|yaml\.compose", path.read_text())
    }
    assert not readers


def test_every_source_file_says_what_it_is_for(repository: Path) -> None:
    for path in (*modules(), *(repository / "benchmarks").rglob("*.py")):
        module = tree(path)
        assert not module.body or ast.get_docstring(module), f"{path} has no docstring"
