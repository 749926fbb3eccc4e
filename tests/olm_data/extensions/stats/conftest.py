"""A dataset with kept columns, copies, drops and a held-out split, and what is counted in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.tokenizing import make_dataset, texts

from olm_data.extensions.stats.count import Stats, collect

LANGUAGES = ["en", "de", "<b>$x$", None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Path) -> Path:
    """Two parquet inputs with kept columns, copies, drops and a held-out split."""
    folder = tmp_path_factory.mktemp("stats")
    rows = [*texts(150), *texts(30), "", " ", "a" * 500, "\u4f60\u597d" * 60]
    rng = np.random.default_rng(1)
    for name, text in (("a", rows), ("b", texts(40, 1000))):
        table = {
            "text": text,
            "language": [LANGUAGES[n % 4] for n in range(len(text))],
            "score": rng.lognormal(size=len(text)),
            "edited": [n % 3 == 0 for n in range(len(text))],
        }
        pq.write_table(pa.table(table), folder / f"{name}.parquet", row_group_size=50)
    inputs = [folder / "a.parquet", folder / "b.parquet"]
    options = {"keep": ["language", "score", "edited"], "holdout": "1/8", "shard_tokens": 500}
    make_dataset(inputs, tiny_tokenizer, folder / "out", **options)
    return folder


@pytest.fixture(scope="module")
def stats(folder: Path) -> Stats:
    return collect(str(folder / "out"))
