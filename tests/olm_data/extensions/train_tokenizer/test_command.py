"""olm-data train-tokenizer: what it prints."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from olm_data.cli import cli


def test_the_command_prints_what_it_made_and_what_to_type_next(text: Path, tmp_path: Path) -> None:
    output = tmp_path / "t.json"
    arguments = ["train-tokenizer", str(text), "--vocab-size", "600", "--output", str(output)]
    dry = CliRunner().invoke(cli, [*arguments, "--dry-run"])
    assert dry.exit_code == 0
    assert not output.exists()
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0
    assert "600 entries" in done.stdout
    assert "(1 record dropped)" in done.stdout
    assert (
        "warning: 1 record malformed (the record is damaged, or the line not a JSON object)"
        in done.stderr
    )
    assert "the first: a.jsonl, byte " in done.stderr
    other = [*arguments[:2], "--vocab-size", "601", "--output", str(output)]
    assert (
        CliRunner().invoke(cli, other).exit_code == 1
    )  # an OlmError, which `entry` gives its code
    assert CliRunner().invoke(cli, [*other, "--overwrite"]).exit_code == 0
    assert f"olm-data tokenize {text} --tokenizer {output}" in done.stderr
