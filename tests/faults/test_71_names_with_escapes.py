"""FAULTS row 71: names and texts with escapes, bidi controls or formulas, from a stranger's files.

Names are refused where they are decoded; text is shown escaped in terminal, page and picture. S6.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.command import inside
from support.forged import forged_lock
from support.small_datasets import mix_datasets
from support.tokenizing import make_dataset, texts

from olm_data.dataset.manifest import decode_manifest
from olm_data.errors import ValidationError, printable, shown
from olm_data.mixture.lock import Lock
from olm_data.page import note, svg
from olm_data.storage.names import acts, is_column_name, is_mixture_name

HOSTILE = ["a\x1b[2Jb", "a\x07", "a\u202eb", "a\nb", "a\u2028b", "a\x9b31m", "x" * 2000, ""]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("names")
    rows = [
        {"text": text, "k": f"$\\frac{n}$\u202e\x1b]0;x\x07"} for n, text in enumerate(texts(9))
    ]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    make_dataset([folder / "a.jsonl"], tiny_tokenizer, folder / "web", keep=["k"])
    mix_datasets(folder, ["web"], stages=[(100, {"web": 1})], sequence_length=16)
    return folder


def lock_with(made: Path, change: Any) -> bytes:
    """The lock, changed as a forger does: with a digest that is right."""
    value = json.loads(next(made.glob("*.lock.json")).read_bytes())
    change(value)
    return forged_lock(value)


@pytest.mark.parametrize("name", HOSTILE)
def test_s6_names_are_refused_where_they_are_decoded(name: str, made: Path) -> None:
    def source(value: dict[str, Any]) -> None:
        value["sources"][0]["name"] = name
        value["locations"] = {name: "./web"}

    def stage(value: dict[str, Any]) -> None:
        value["stages"][0]["name"] = name

    assert not is_mixture_name(name)
    for change in (source, stage):
        with pytest.raises(ValidationError) as caught:
            Lock.decode(lock_with(made, change), "lock")
        assert not acts(str(caught.value).replace("\n", ""))
    path = made / "web" / "manifest.json"
    manifest = decode_manifest(path.read_bytes(), "manifest")
    options = msgspec.structs.replace(manifest.options, keep=((name, "string"),))
    forged = msgspec.structs.replace(
        manifest, stored_options=msgspec.Raw(msgspec.json.encode(options))
    )
    forged = msgspec.structs.replace(forged, digest=forged.compute_digest())
    with pytest.raises(ValidationError, match="control characters"):
        decode_manifest(forged.encode(), "manifest")


def test_s6_names_in_other_scripts_are_names() -> None:
    for name in ("\u540d\u524d", "caf\u00e9 $x$", "\U0001f468\u200d\U0001f469", "a\u3000b"):
        assert is_column_name(name)


def test_71_no_escape_of_a_kept_value_acts(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = next(made.glob("*.lock.json"))
    page = tmp_path / "page.html"
    for words in (
        ("show", "document", made / "web", "0"),
        ("stats", made / "web", "--html", page),
        ("show", "document", lock, "web:0"),
        ("report", lock, "--output", tmp_path / "report.html"),
    ):
        done = inside(capsys, *map(str, words))
        assert done.returncode == 0, done.stderr
        assert not acts((done.stdout + done.stderr).replace("\n", "")), words
    for file in (page, tmp_path / "report.html"):
        assert not acts(file.read_text().replace("\n", ""))


def test_s6_a_formula_in_a_picture_is_drawn_as_it_stands() -> None:
    def draw(axes: Any) -> None:
        axes.plot([1, 10, 100], [1, 10, 1000], label=r"$\frac{oops$ \x07")
        axes.set_yscale("log")
        axes.set_title("\x1b[31m\u202e$x_$")
        axes.legend()

    drawn = svg(draw, "a \u202e picture")
    assert r"$\frac{oops$" in drawn
    assert "mathdefault" not in drawn
    assert not acts(drawn.replace("\n", ""))


def test_s6_everything_shown_goes_through_one_function() -> None:
    text = "a\x1b[31m\u202e\u2066b\nc"
    assert shown(text) == "a\\x1b[31m\\u202e\\u2066b\nc"
    assert printable(text) == shown(text).replace("\n", "\\n")
    assert note(text) == f'<p class="note">{shown(text)}</p>'


def test_s8_keeping_a_column_with_a_control_character_is_refused_before_work(
    tiny_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps({"text": "one", "k\x1b[31m": 1}) + "\n")
    done = inside(
        capsys,
        *("tokenize", str(source), "--tokenizer", str(tiny_tokenizer), "--keep", "k\x1b[31m"),
        *("--output", str(tmp_path / "out")),
    )
    assert done.returncode == 4
    assert "control characters" in done.stderr
    assert "\x1b" not in done.stderr
    assert not (tmp_path / "out" / "plan.json").exists()


def test_71_a_step_of_a_run_log_with_escapes_stays_on_its_line(tmp_path: Path) -> None:
    from olm_data.run_log.log import read_metrics

    (tmp_path / "metrics.jsonl").write_bytes(b'{"a\x1b": 1}\n')
    with pytest.raises(ValidationError, match="control bytes") as caught:
        list(read_metrics(tmp_path))
    assert "\x1b" not in str(caught.value)
