"""A report shows a mixture as its lock has it."""

from __future__ import annotations

from pathlib import Path

from support.html_page import HtmlPage

from olm_data.mixture.lock import Lock
from olm_data.mixture.summary import tree


def test_report_shows_stages_epochs_and_packing_as_the_lock_has_them(
    lock: Path, alone: str
) -> None:
    planned, cells = Lock.read(lock), set(HtmlPage(alone).text)
    for stage in planned.stages:
        assert {stage.name, f"{stage.rows:,}"} <= cells
    for i, source in enumerate(planned.sources):
        rows = sum(stage.rows_by_source[i] for stage in planned.stages)
        assert {f"{rows / source.rows:.4f}", f"{rows * 16:,}", f"{source.rows:,}"} <= cells
        assert f"{1 - source.plan.tokens / (source.rows * 16):.4%}" in cells
    assert {"8", "2"} <= cells  # max_epochs
    main, anneal = tree(planned)
    group = main.members[0]
    assert (group.name, group.members[0].name) == ("both", "a")
    for node in (*main.members, *group.members, *anneal.members):
        assert {node.name, f"{node.rows * 16:,}"} <= cells
        for share in (node.share_wanted, node.share_compiled, node.share_got):
            assert f"{100 * share:.3f} %" in cells
