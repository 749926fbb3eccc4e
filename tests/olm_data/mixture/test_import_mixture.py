"""Promises of imported mixtures: exact weights, caps and files of the other, or a refusal."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from click.testing import CliRunner

from olm_data.cli import cli
from olm_data.errors import ConflictError, UsageError
from olm_data.mixture.import_mixture import manifest_text, read_mixture_file
from olm_data.mixture.manifest import parse_mixture

OLMO = b"""\
sources:
  - source_name: reddit:high
    target_ratio: 0.18273684787
    max_repetition_ratio: 2.5
    max_source_fraction: 0.5
    paths:
      - gs://bucket/reddit/**/*.npy  # globs stay as they are
      - s3://bucket/more/*.npy
  - source_name: web
    target_ratio: .81726315213
    paths: [/data/web/part-0.npy]
"""


def manifest(raw: bytes, tokens: int | None = None) -> str:
    return manifest_text(
        read_mixture_file(raw, "f"), origin="f", sequence_length=64, tokens=tokens, data="./tokens"
    )


def test_an_olmo_core_source_list_becomes_a_manifest_with_exact_numbers() -> None:
    text = manifest(OLMO, 10**9)
    mixture = parse_mixture(text)
    assert {s.name: (s.data, s.max_epochs) for s in mixture.sources} == {
        "reddit-high": ("./tokens/reddit-high", Fraction(5, 4)),
        "web": ("./tokens/web", 1),
    }
    assert mixture.stages[0].tokens == 10**9
    assert mixture.stages[0].shares == {
        "reddit-high": Fraction("0.18273684787"),
        "web": Fraction("0.81726315213"),
    }
    assert "# gs://bucket/reddit/**/*.npy" in text


def test_a_whole_olmo_core_mixture_config_says_tokens_and_seed() -> None:
    lines = OLMO.decode().replace("\n", "\n  ")
    text = manifest(f"source_list:\n  {lines}\nrequested_tokens: 5000\nseed: 42\n".encode())
    assert parse_mixture(text).stages[0].tokens == 5000
    assert parse_mixture(text).seed == 42


@pytest.mark.parametrize(
    "blend",
    [
        b"0.3 /data/web_text_document 0.7 /data/code_text_document",
        b"--data-path 0.3 /data/web_text_document \\\n 0.7 /data/code_text_document\n",
        b'{"train": ["0.3", "/data/web_text_document", "0.7", "/data/code_text_document"]}',
        b'{"train": [0.3, "/data/web_text_document", 0.7, "/data/code_text_document"]}',
        b"30 /data/web_text_document\n70 /data/code_text_document\n",
    ],
)
def test_a_megatron_blend_becomes_a_manifest_with_its_weights(blend: bytes) -> None:
    mixture = parse_mixture(manifest(blend, 1000))
    assert mixture.stages[0].shares == {"web": Fraction(3, 10), "code": Fraction(7, 10)}


def test_a_blend_without_weights_goes_once_through_each_source() -> None:
    mixture = parse_mixture(manifest(b"/a/web_text_document /b/web_text_document /c/code"))
    assert mixture.stages[0].epochs == {"a-web": 1, "b-web": 1, "code": 1}
    with pytest.raises(UsageError, match="sizes decide"):
        manifest(b"/a/web /c/code", 1000)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "empty"),
        (b"0.5 /a x /b", "no numbers"),
        (b"1 /a 1 /a", "two sources"),
        (b"-1 /a 1 /b", "negative"),
        (b"1 /a 1 /b", "how many tokens"),
        (OLMO.replace(b"paths", b"path"), "unknown key 'path'"),
        (OLMO.replace(b": web", b": reddit_high").replace(b"t:h", b"t_h"), "two sources"),
        (OLMO.replace(b".5\n", b".5x\n"), "not a number"),
        (b"source: 1\n", "no list `sources`"),
    ],
)
def test_what_has_no_exact_meaning_is_refused(raw: bytes, says: str) -> None:
    with pytest.raises(UsageError) as error:
        manifest(raw)
    assert says in str(error.value)


def test_the_command_writes_a_manifest_once_and_says_what_to_import(tmp_path: Path) -> None:
    (tmp_path / "mix.yaml").write_bytes(OLMO)
    arguments = ["import-mix", str(tmp_path / "mix.yaml"), "--tokens", "1B"]
    arguments += ["--output", str(tmp_path / "manifest.yaml")]
    printed = CliRunner().invoke(cli, [*arguments, "--dry-run"], standalone_mode=False)
    assert not (tmp_path / "manifest.yaml").exists()
    assert parse_mixture(printed.stdout).stages[0].tokens == 10**9
    done = CliRunner().invoke(cli, arguments, standalone_mode=False)
    assert (tmp_path / "manifest.yaml").read_text() == printed.stdout
    assert "olm-data import 'gs://bucket/reddit/**/*.npy'" in done.stderr
    again = CliRunner().invoke(cli, arguments, standalone_mode=False)
    assert isinstance(again.exception, ConflictError)
