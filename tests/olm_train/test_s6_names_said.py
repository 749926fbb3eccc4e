"""Rows S3 and S6: names that people give to a run: what is said of them, and which are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from support.runs import build_trainer

from olm_data.errors import UsageError
from olm_data.redaction import redacted
from olm_train.generate import generate
from olm_train.generate import main as generate_command
from olm_train.run.command import main

ESCAPES = "\x1b]0;x\x07\u202e\u2066\x9b31m"


def test_s6_a_run_folders_name_with_escapes_acts_on_no_terminal(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such a folder is not made; one in a folder that somebody else named is said in escapes."""
    with pytest.raises(UsageError, match="control characters"):
        build_trainer(tiny_mixture, tmp_path / f"run{ESCAPES}")
    folder = tmp_path / f"theirs{ESCAPES}"
    folder.mkdir()
    code = main([str(folder / "train.yaml")])
    said = capsys.readouterr().err
    assert code == 2
    assert not set(said) & set(ESCAPES) - set("]0;x31m")
    assert r"\x1b]0;x\x07\u202e" in said


@pytest.mark.parametrize("name", ["runs/{}", "{}", "/nowhere/x-{}/y"])
def test_s3_a_save_folder_named_by_a_credential_is_refused(
    name: str, tiny_mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "canary0123456789canary"
    monkeypatch.setenv("TRACKER_API_KEY", secret)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="holds a credential") as error:
        build_trainer(tiny_mixture, Path(name.format(secret)))
    assert secret not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_s3_a_credential_stays_one_where_a_file_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRACKER_API_KEY", "canary0123456789")
    (tmp_path / "canary0123456789").touch()
    assert redacted("key canary0123456789") == "key ***"
    monkeypatch.setenv("TRACKER_API_KEY", str(tmp_path / "canary0123456789"))
    assert redacted(f"read {tmp_path}/canary0123456789").endswith("canary0123456789")


@pytest.mark.parametrize(
    "options",
    [{"temperature": float("nan")}, {"temperature": float("inf")}, {"prompt": "x\udcff"}],
)
def test_s6_generate_refuses_what_is_no_text_and_no_number(options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        generate("nowhere", **{"prompt": "x", **options})  # type: ignore[arg-type]
    wide = CliRunner().invoke(generate_command, ["nowhere", "--seed", "9" * 30])
    assert (wide.exit_code, "Traceback" in wide.output) == (2, False)
