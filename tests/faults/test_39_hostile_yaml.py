"""Row 39: YAML bombs, aliases, duplicates, tags and huge numbers are refused early and small."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.command import program
from support.stand_in import parse_mixture

from olm_data.config import strict_yaml
from olm_data.errors import UsageError

BILLION_LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)
HOSTILE = {
    "billion laughs": BILLION_LAUGHS,
    "merge bomb": "a: 1\n<<: {b: 2}\n",
    "deep flow sequence": "[" * 500_000,
    "deep flow mapping": "{a: " * 200_000,
    "deep block": "".join("  " * i + "a:\n" for i in range(900)),
    "huge integer": "a: " + "9" * 1_000_000,
    "huge exponent": "a: 1e999999999",
    "huge mantissa": "a: 0." + "1" * 1_000_000,
    "python object": "a: !!python/object/apply:os.system [touch canary]",
    "duplicate key": "a: 1\n" * 100_000,
    "many documents": "---\na: 1\n" * 100_000,
    "too long": "a: " + "x" * 2**20,
    "not a number": "a: .nan",
    "complex key": "? {a: 1}\n: 1",
    "binary": "\x00" * 1_000_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_with_its_line_after_a_handful_of_events(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    events = 0
    parse = yaml.parse

    def counting(*arguments: Any, **options: Any) -> Iterator[Any]:
        nonlocal events
        for event in parse(*arguments, **options):
            events += 1
            yield event

    monkeypatch.setattr(yaml, "parse", counting)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as error:
        strict_yaml.load(HOSTILE[name], "m.yaml")
    assert events < 100
    assert (error.value.where or "").startswith("m.yaml")
    assert len(str(error.value)) < 500
    assert list(tmp_path.iterdir()) == []


def test_all_hostile_files_together_are_refused_in_little_memory(tmp_path: Path) -> None:
    for number, text in enumerate(HOSTILE.values()):
        (tmp_path / f"{number}.yaml").write_text(text)
    script = (
        "import sys\n"
        "from olm_data.config.values import Values\n"
        "from olm_data.errors import UsageError\n"
        "from support.memory import peak\n"
        "before = peak()\n"
        "for path in sys.argv[1:]:\n"
        "    try:\n"
        "        Values.read(path)\n"
        "    except UsageError:\n"
        "        continue\n"
        "    sys.exit(f'{path} was accepted')\n"
        "print((peak() - before) // 1024)\n"
    )
    limit = partial(resource.setrlimit, resource.RLIMIT_CPU, (20, 20))
    done = program("-c", script, *sorted(tmp_path.iterdir()), preexec_fn=limit)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 50  # MB


def test_an_unknown_key_is_named_with_its_line_and_the_nearest_known_key() -> None:
    text = "version: 1\nsources:\n  web: {data: web, max_epoch: 2}\n"
    with pytest.raises(UsageError) as error:
        parse_mixture(text, "m.yaml")
    assert str(error.value).splitlines() == [
        "unknown field sources.web.max_epoch",
        "  where: m.yaml:3",
        "  fix: did you mean 'max_epochs'?",
    ]
