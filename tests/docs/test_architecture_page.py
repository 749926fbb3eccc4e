"""The worked examples of docs/explanation/architecture.md: a fourth order, a fourth packing.

Each is run as it stands there, in this process, so that what it registered can be tried further.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.pages import REPOSITORY, Block, printed, read_page
from support.small_datasets import write_dataset
from support.stand_in import parse_mixture

from olm_data.dataset.dataset import Dataset
from olm_data.errors import UsageError
from olm_data.mixture.lock import Lock
from olm_data.order.orders import ORDERS
from olm_data.packing.packings import PACKINGS
from olm_data.rows.reader import RowReader

NAME = "docs/explanation/architecture.md"
EXAMPLES = [b for b in read_page(NAME, REPOSITORY / NAME).blocks if b.language == "python"]
MANIFEST = next(
    b.text.split("<<'YAML'\n")[1].split("YAML\n")[0]
    for b in read_page(NAME, REPOSITORY / NAME).blocks
    if "mix.yaml" in b.text
)
S = 16


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Lock]]:
    """Run the example whose class has a name; give its lock. What it registers is taken back."""
    rng = np.random.default_rng(1)
    sizes = rng.integers(1, 3 * S, 60)
    shards = [[rng.integers(1, 50_000, n).tolist() for n in part] for part in (sizes[:40], sizes)]
    write_dataset(tmp_path / "tokens" / "stories", [shards[0], shards[1][40:]])
    (tmp_path / "mix.yaml").write_text(MANIFEST)
    monkeypatch.chdir(tmp_path)
    before = [dict(registry) for registry in (ORDERS, PACKINGS)]

    def run(name: str) -> Lock:
        block: Block = next(b for b in EXAMPLES if f"class {name}(" in b.text)
        said = io.StringIO()
        scope: dict[str, Any] = {"__name__": "example"}
        with contextlib.redirect_stdout(said):
            exec(compile(block.text, str(block), "exec", dont_inherit=True), scope)
        assert printed(block, said.getvalue()) is None
        lock: Lock = scope["lock"]
        return lock

    yield run
    for registry, names in zip((ORDERS, PACKINGS), before, strict=True):
        for name in set(registry) - set(names):
            del registry[name]  # type: ignore[attr-defined]


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


def test_what_the_examples_register_is_gone_again() -> None:
    assert (len(ORDERS), len(PACKINGS)) == (3, 3)
