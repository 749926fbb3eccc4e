"""Pages are self-contained, their pictures told in words, their text escaped."""

from __future__ import annotations

import re

from olm_data.page import svg, whole_numbers


def test_an_axis_of_counts_has_whole_numbers() -> None:
    drawn = svg(lambda axes: (axes.plot([1, 2], [0, 1]), whole_numbers(axes.xaxis)), "counts")
    labels = re.findall(r">([\d.,]+)</text>", drawn)
    assert {"1", "2"} <= set(labels)
    assert "1.2" not in labels
