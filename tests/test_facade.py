"""What olm_train may import of olm_data: few rooms, and of those the modules that are named here.

A room that is not in the table is none of training's business: sources, encoders, runners and the
verbs of the command line. A new name is added here on purpose, or the need for it goes away.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from support.sources import modules, together, tree

pytestmark = together

FACADE = {
    "values": {
        "bounded_json", "counts", "decoding", "errors", "path_kinds", "redaction",
        "model_folder", "regular_files", "threads",
    },
    "command line": {"command", "extras", "plugins", "printing"},
    "config": {
        "arguments", "convert", "docs", "hints", "import_path", "schema",
        "values",
    },
    "storage": {
        "disk", "exclusive", "lease", "names", "plaintext_warning",
        "output_paths", "store",
    },
    "order": {"schedule", "steps"},
    "dataset": {"dataset", "eval_set", "shard", "tokenizer"},
    "mixture": {"arriving", "lock", "shared"},
    "tokenization": {"waiting"},
    "rows": {"cache_plan", "fields", "label_groups", "reader", "views"},
    "run_log": {
        "log", "metric_names",
        "run_folder",
    },
}  # fmt: skip
"""Room -> its modules; the first two are no rooms but single modules."""

PLAIN = ("values", "command line")


def imported(repository: Path) -> Iterator[str]:
    """Yield the modules of olm_data that the core of olm_train imports, in functions too."""
    known = {
        ".".join(path.relative_to(repository).with_suffix("").parts).removesuffix(".__init__")
        for path in modules("olm_data")
    }
    for path in modules("olm_train"):
        if "extensions" in path.parts:
            continue
        for node in ast.walk(tree(path)):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name for name in inner if name in known] or [node.module]
            yield from (name for name in names if name.partition(".")[0] == "olm_data")


def test_training_imports_what_the_table_names_and_the_table_nothing_else(
    repository: Path,
) -> None:
    allowed = {
        f"olm_data.{name}" if room in PLAIN else f"olm_data.{room}.{name}"
        for room, names in FACADE.items()
        for name in names
    }
    found = set(imported(repository)) - {"olm_data"}  # __version__
    assert found - allowed == set(), "training reaches into a module that is not for it"
    assert allowed - found == set(), "the table names a module that training does not need"
