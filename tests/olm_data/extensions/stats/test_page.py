"""The page of stats shows what was counted, and fetches nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.html_page import HtmlPage

from olm_data.errors import ResourceError
from olm_data.extensions.stats.count import Stats
from olm_data.extensions.stats.page import write_stats_page


def test_the_page_shows_it_all_fetches_nothing_and_is_escaped(stats: Stats, tmp_path: Path) -> None:
    source = write_stats_page(stats, str(tmp_path / "s.html")).read_text()
    page = HtmlPage(source)
    for part in ("Document lengths", "b.parquet", "dropped: empty", "Column language", "<b>$x$"):
        assert part in "".join(page.text)
    assert "30 documents equal an earlier one" in "".join(page.text)
    assert page.fetched == []
    assert "prefers-color-scheme: dark" in source
    assert "#010203" not in source
    with pytest.raises(ResourceError, match="does not exist"):
        write_stats_page(stats, str(tmp_path / "nowhere" / "s.html"))
