"""A report shows how long the documents of each source are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support.html_page import HtmlPage

from olm_data.extensions.report.write import length_section
from olm_data.mixture.lock import Lock


def test_the_table_has_the_lengths_of_each_source(lock: Path) -> None:
    mixture = Lock.read(lock)
    datasets = mixture.open_datasets()
    cells = HtmlPage(length_section(mixture, datasets)).text
    for source, dataset in zip(mixture.sources, datasets, strict=True):
        lengths = np.array([len(document.tokens) for document in dataset])
        at = cells.index(source.name, cells.index("longer than a row"))
        assert cells[at + 1 : at + 8] == [
            f"{len(lengths):,}",
            f"{lengths.mean():,.0f}",
            *(f"{np.percentile(lengths, share):,.0f}" for share in (10, 50, 90)),
            f"{lengths.max():,}",
            f"{100 * np.mean(lengths > mixture.sequence_length):.1f} %",
        ]
