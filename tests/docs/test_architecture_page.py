"""The worked examples of docs/explanation/architecture.md: a fourth order, a fourth packing.

Each is installed as it stands there, for this process, so that it can be tried further.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.installed import install_block
from support.pages import REPOSITORY, Block, printed, read_page
from support.reading import read_plan
from support.small_datasets import write_dataset
from support.stand_in import parse_mixture

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.inputs import SourceRequest
from olm_data.errors import InputError, UsageError, ValidationError
from olm_data.mixture.lock import Lock
from olm_data.order.orders import ORDERS
from olm_data.packing.packings import PACKINGS
from olm_data.rows.reader import RowReader
from olm_data.sources import resolve_source

NAME = "docs/explanation/architecture.md"
BLOCKS = read_page(NAME, REPOSITORY / NAME).blocks
MANIFEST = next(
    b.text.split("<<'YAML'\n")[1].split("YAML\n")[0] for b in BLOCKS if "mix.yaml" in b.text
)
S = 16


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Lock]]:
    """Install the example whose class has a name, run what tries it, give its lock."""
    rng = np.random.default_rng(1)
    sizes = rng.integers(1, 3 * S, 60)
    shards = [[rng.integers(1, 50_000, n).tolist() for n in part] for part in (sizes[:40], sizes)]
    write_dataset(tmp_path / "tokens" / "stories", [shards[0], shards[1][40:]])
    (tmp_path / "mix.yaml").write_text(MANIFEST)
    monkeypatch.chdir(tmp_path)
    modules = []

    def run(name: str) -> Lock:
        at = next(n for n, b in enumerate(BLOCKS) if f"class {name}(" in b.text)
        modules.append(install_block(BLOCKS[at].text, tmp_path))
        monkeypatch.syspath_prepend(tmp_path)
        trial: Block = BLOCKS[at + 1]
        said = io.StringIO()
        scope: dict[str, Any] = {"__name__": "example"}
        with contextlib.redirect_stdout(said):
            exec(compile(trial.text, str(trial), "exec", dont_inherit=True), scope)
        assert printed(trial, said.getvalue()) is None
        lock: Lock = scope["lock"]
        return lock

    yield run
    for module in modules:
        del sys.modules[module]


def test_the_fourth_order_is_read_locked_and_inverted(ran: Callable[[str], Lock]) -> None:
    lock = ran("Sequential")
    again = Lock.read("sequential.lock.json")
    assert again == lock
    assert b'"sequential": {\n  "shift": 3\n }' in lock.encode()
    schedule, n = again.schedule(), lock.sources[0].rows
    found = schedule.locate(np.arange(2 * n))
    assert found.row.tolist() == [*range(n), *(np.arange(3, n + 3) % n)]
    for row in range(n):
        assert schedule.rows_of(0, row).tolist() == np.flatnonzero(found.row == row).tolist()
    stream = Dataset.open("tokens/stories")
    batch = RowReader(again).read(np.arange(n))
    assert batch.input_ids.reshape(-1).tolist() == stream.read(0, n * S).tolist()
    with pytest.raises(UsageError, match="shift is at least 0") as caught:
        parse_mixture(MANIFEST + "order: sequential\nshift: -1\n")
    assert str(caught.value.where).endswith(":9")
    with pytest.raises(UsageError, match="shift has no meaning with order: global"):
        parse_mixture(MANIFEST + "shift: 1\n")


def test_the_fourth_packing_is_planned_locked_and_read(ran: Callable[[str], Lock]) -> None:
    lock = ran("Opening")
    again = Lock.read("opening.lock.json")
    assert (again.packing.name, again.digest) == ("opening", lock.digest)
    dataset = Dataset.open("tokens/stories")
    long = [document.tokens for document in dataset if len(document.tokens) >= 8]
    (plan,) = again.open_plans(verify="full")
    assert plan is not None
    assert plan.rows == len(long)
    reader, schedule = RowReader(again), again.schedule()
    for number, tokens in enumerate(long):
        for row in schedule.rows_of(0, number):
            batch = reader.read(np.array([row]))
            held = min(len(tokens), S)
            assert batch.input_ids[0, :held].tolist() == tokens[:held].tolist()
            labels = tokens[1 : held + 1].tolist()
            assert batch.labels[0].tolist() == labels + [-100] * (S - len(labels))


def test_the_fourth_format_is_tokenised_packed_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = next(b.text for b in BLOCKS if "class Fasta(" in b.text)
    install_block(block, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    text = block.split("printf '")[1].split("'")[0].replace("\\n", "\n").encode()
    (tmp_path / "some.fasta").write_bytes(text)
    (tmp_path / "more.fasta.gz").write_bytes(gzip.compress(text * 200))
    try:
        names = ("some.fasta", "more.fasta.gz")
        plan = resolve_source(SourceRequest(inputs=tuple(str(tmp_path / name) for name in names)))
        assert [(i.format, i.position) for i in plan.inputs] == [("fasta", "row")] * 2
        found = read_plan(plan)
        assert found.texts == ["MKVLAAGG", "MPEPTIDE"] * 201
        assert found.ids == ["one", "two"] * 201
    finally:
        del sys.modules["fasta"]
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(tmp_path)])
    with pytest.raises(InputError, match="no installed package reads the format fasta"):
        read_plan(plan)


def test_a_lock_whose_order_is_not_installed_is_refused(
    ran: Callable[[str], Lock], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran("Sequential")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != str(Path.cwd())])
    assert "sequential" not in ORDERS
    with pytest.raises(ValidationError, match="sequential"):
        Lock.read("sequential.lock.json")


def test_only_ours_are_there_without_a_package() -> None:
    assert list(ORDERS) == ["global", "arriving", "olmo-core", "windowed"]
    assert list(PACKINGS) == ["concat", "best_fit", "document"]
