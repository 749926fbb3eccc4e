"""Make conversations of this machine's Python library: what does a function do?

    python chats.py out/chats.jsonl

A row for each public function, method or class with a docstring: the question names it, the answer
is the first sentence of the docstring. The order is that of the files' names.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import sysconfig
from pathlib import Path

LIBRARY = Path(sysconfig.get_path("stdlib"))
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3"}
NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def answers(path: Path) -> list[tuple[str, str]]:
    """Return the name and the first sentence of what a module says of its functions and classes."""
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError:
        return []
    found = []
    for node in ast.walk(tree):
        said = ast.get_docstring(node) if isinstance(node, NAMED) else None
        if said and not node.name.startswith("_"):
            paragraph = " ".join(said.split("\n\n")[0].split())
            found.append((node.name, re.split(r"(?<=[.!?]) ", paragraph)[0]))
    return found


def main(output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    rows = 0
    with output.open("w", encoding="utf-8") as file:
        for path in sorted(LIBRARY.rglob("*.py")):
            if LEFT_OUT & {*path.relative_to(LIBRARY).parts}:
                continue
            for name, answer in answers(path):
                turns = [
                    {"role": "user", "content": f"What does {path.stem}.{name} do?"},
                    {"role": "assistant", "content": answer},
                ]
                print(json.dumps({"messages": turns}), file=file)
                rows += 1
    print(f"{rows:,} conversations: {output}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
