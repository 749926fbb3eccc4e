"""What a page shows of a step is harmless, and leaves out the rows that the step left out."""

from __future__ import annotations

import json
from pathlib import Path

import olm_data
from olm_data.errors import printable
from olm_data.extensions.report.step_documents import step_documents
from olm_data.extensions.report.write import write_report
from olm_data.mixture.lock import Lock
from olm_data.rows.views import LockRows
from olm_data.run_log.log import Step


def test_rows_that_were_skipped_are_not_those_of_the_step(lock: Path) -> None:
    step = Step(
        step=2, tokens=96, rows=(4, 9), skipped=((5, 7),), metrics={"optim/step skipped": 1.0}
    )
    found = step_documents(LockRows(Lock.read(lock)), step, most_rows=2, most_text=5)
    assert ([row.row for row in found.rows], found.rows_of_step) == ([4, 7], 3)
    assert found.state == "not taken"
    assert sum(rows for *_, rows in found.sources) == 3
    for row in found.rows:
        pieces = LockRows(Lock.read(lock)).view(row.row).pieces
        assert [piece.text for piece in row.pieces] == [
            "\n".join(map(printable, piece.text[:5].split("\n"))) for piece in pieces
        ]


def test_trained_tokens_of_chats_are_marked_counted_and_harmless(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    asked, answer = "<b> \x1b é 🌍", "<i>no</i>\n\u202e 世界"
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    rows = [json.dumps({"messages": turns * (n % 3 + 1)}) + "\n" for n in range(9)]
    (tmp_path / "chats.jsonl").write_text("".join(rows))
    olm_data.tokenize(
        tmp_path / "chats.jsonl",
        tokenizer=tiny_tokenizer,
        output=tmp_path / "chats",
        format="chat",
        chat_template="tulu",
    )
    stage = {"name": "main", "epochs": {"chats": 1}}
    keys = {"version": 1, "sequence_length": 64, "packing": "best_fit", "stages": [stage]}
    manifest = tmp_path / "mix.json.yaml"
    manifest.write_text(json.dumps(keys | {"sources": {"chats": {"data": "./chats"}}}))
    mixture = olm_data.mix(manifest, tmp_path / "mix.lock.json")
    step = Step(step=1, tokens=0, rows=(0, mixture.total_rows), metrics={})
    shown = step_documents(LockRows(mixture), step, most_rows=99, most_text=999)
    pieces = [piece for row in shown.rows for piece in row.pieces]
    dataset = mixture.open_dataset(0)
    assert sum(piece.trained or 0 for piece in pieces) == dataset.manifest.trained
    for piece in pieces:
        assert "".join(text for text, _ in piece.runs) == piece.text
    marked = {text for piece in pieces for text, on in piece.runs if on}
    end = "<|endoftext|>"
    assert "<i>no</i>\n\\u202e 世界" + end in marked
    assert not any("<b>" in text or "user" in text for text in marked)
    page = write_report(str(tmp_path / "mix.lock.json"), [], str(tmp_path / "r.html"), say=print)
    text = page.read_text()
    assert "<mark>&lt;i&gt;no&lt;/i&gt;\n" in text
    share = 100 * dataset.manifest.trained / dataset.tokens
    assert f"{share:.1f} % of tokens" in text
    assert "<mark>Underlined</mark>" in text
