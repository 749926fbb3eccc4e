"""Tasks of lm-evaluation-harness in a folder: YAML beside JSON lines of made-up questions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.eval_requests import words

CHOICE = """
task: animals
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}, cache_dir: {cache}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: choices
doc_to_target: gold
target_delimiter: ""
metric_list: [{{metric: acc}}, {{metric: acc_norm}}, {{metric: acc_mutual_info}}]
"""
TEXTS = """
task: texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}, cache_dir: {cache}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""
WRITE = """
task: goon
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}, cache_dir: {cache}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "never"
generation_kwargs: {{until: ["e", "\\n"], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


def questions() -> list[dict[str, Any]]:
    """Of 2 to 4 choices, contexts of 1 to 21 words, some with a space at their end."""
    found = []
    for n in range(17):
        choices = [" " + words(n + k + 3, 1 + (n + k) % 5) for k in range(2 + n % 3)]
        context = words(n, 1 + n % 5 * 5) + (" " if n % 5 == 3 else "")
        found.append({"context": context, "choices": choices, "gold": n % len(choices)})
    return found


def texts() -> list[str]:
    """Of 1 to 120 words: the longer ones are longer than a model looks at."""
    return [f"{n}: {words(n, 1 + 17 * n % 121)}" for n in range(9)]


def write_tasks(folder: Path) -> Path:
    """Write `animals`, `texts` and `goon`; return animals.jsonl, which eval-set build reads too."""
    folder.mkdir(parents=True, exist_ok=True)
    asked = [each | {"unconditional_context": ""} for each in questions()]
    said = [{"text": text} for text in texts()]
    for name, rows in (("animals", asked), ("texts", said)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines)
    for name, file, form in (
        ("animals", "animals", CHOICE),
        ("texts", "texts", TEXTS),
        ("goon", "texts", WRITE),
    ):
        path = (folder / f"{file}.jsonl").resolve()
        (folder / f"{name}.yaml").write_text(
            form.format(file=path, cache=folder.resolve() / "cache")
        )
    return folder / "animals.jsonl"
