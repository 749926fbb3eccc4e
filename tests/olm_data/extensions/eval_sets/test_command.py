"""`olm-data eval-set`: builds a task and says what it built; a metric that is none is refused."""

from __future__ import annotations

import json
from pathlib import Path

from support.command import Olm

from olm_data.dataset.eval_set import EvalSet

LINES = [
    {"context": "The quick brown", "choices": [" fox", " dog", " owl jumps"], "gold": 0},
    {"context": ["over the lazy ", "over a"], "choices": ["dog", " fox"], "gold": 1},
    {"context": "", "choices": ["seven owls sleep"]},
]


def test_the_command_builds_and_says_what_it_built(
    tmp_path: Path, tiny_tokenizer: Path, olm: Olm
) -> None:
    source, output = str(tmp_path / "mine.jsonl"), str(tmp_path / "set")
    Path(source).write_text("".join(json.dumps(line) + "\n" for line in LINES))
    words = ["eval-set", "build", source, "--tokenizer", str(tiny_tokenizer), "--output", output]
    dry = olm(*words, "--dry-run")
    assert "would build mine: 3 questions, 6 choices, primary metric len_norm" in dry.stdout
    assert not (tmp_path / "set").exists()
    made = olm(*words, "--primary", "acc", "--licence", "CC0")
    assert "questions      3\nrequests       6\n" in made.stdout
    info = EvalSet.open(output).info
    assert (info.primary, info.licence) == ("acc", "CC0")
    again = olm(*words, "--primary", "acc", "--licence", "CC0", "--json")
    assert json.loads(again.stdout)["digest"] == info.digest
    wrong = olm(*words, "--primary", "accuracy")
    assert wrong.returncode == 2
    assert "there is no metric 'accuracy'" in wrong.stderr
    assert olm(*words, "--task", "arc_easy/val").returncode == 2
