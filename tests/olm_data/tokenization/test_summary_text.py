"""What is printed of a run."""

from __future__ import annotations

from pathlib import Path

from support.tokenizing import make_dataset, make_request, texts, write_jsonl

from olm_data.tokenization.summary import input_lines, summary_lines


def test_the_summary_shows_where_the_records_of_each_input_went(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    inputs = [write_jsonl(tmp_path / f"{k:02}.jsonl", [*texts(3, k), "", ""]) for k in range(12)]
    inputs.append(write_jsonl(tmp_path / "12.jsonl", texts(3)))
    request = make_request(inputs, tiny_tokenizer)
    summary = make_dataset(inputs, tiny_tokenizer, tmp_path / "out")
    lines = input_lines(summary)
    assert lines[0].strip() == "00.jsonl: 5 = 3 documents + 2 empty"
    assert len(lines) == 11
    assert lines[-1].strip() == "and 2 more inputs with drops"
    assert not any("quarantine" in line for line in summary_lines(request, summary, 1))
