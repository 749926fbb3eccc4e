"""olm-data import: which files are a mixture, and which options are for the other kind."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command import inside


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["tokens.npy", "--output", "out"], "--tokenizer and --output are needed"),
        (["tokens.npy", "--tokenizer", "gpt2"], "--tokenizer and --output are needed"),
        (["tokens.npy", "--tokens", "1B"], "--tokens is for mixtures, and these are token files"),
        (["a.npy", "b.yaml", "--data", "x"], "--data is for mixtures, and these are token files"),
        (["mix.yaml", "--eos", "none"], "--eos is for token files, and this is a mixture"),
        (["blend", "--strict-inputs"], "--strict-inputs is for token files"),
        (["prefix.txt", "--bos", "none"], "--tokenizer and --output are needed"),
    ],
)
def test_an_option_of_the_other_kind_is_refused(
    words: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "blend").write_text("1 a 1 b")
    (tmp_path / "prefix.txt.bin").touch()  # of Megatron, whatever its name ends with
    said = inside(capsys, "import", *words)
    assert said.returncode == 2
    assert says in said.stderr
