"""A cache too small for a mixture is refused with the numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.remote import loader, remote_mixture

from olm_data.errors import ResourceError, UsageError
from olm_data.mixture.lock import Lock
from olm_data.rows import cache_plan
from olm_data.rows.cache_plan import cache_need


@pytest.mark.parametrize(
    ("keys", "fix"),
    [({"order": "windowed", "window_chunks": 2}, "size_gb"), ({"order": "global"}, "windowed")],
)
def test_a_budget_that_is_too_small_is_refused_with_the_numbers(
    keys: dict[str, object], fix: str, url: str, tmp_path: Path
) -> None:
    remote, local = remote_mixture(tmp_path, url, **keys)
    lock = Lock.read(remote)
    least = cache_need(lock, lock.open_datasets()).least
    with pytest.raises(UsageError) as caught:
        loader(remote, tmp_path / "cache", size=least - 1)
    assert f"{least - 1:,} bytes; this mixture needs {least:,}" in str(caught.value)
    assert fix in str(caught.value.fix)
    assert loader(local, tmp_path / "cache", size=1).steps  # nothing to fetch, nothing to refuse


def test_a_disk_with_too_little_room_is_refused_with_the_numbers(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, _ = remote_mixture(tmp_path, url)
    monkeypatch.setattr(cache_plan, "free_bytes", lambda folder: 1234)
    with pytest.raises(ResourceError, match="1,234 are free"):
        loader(remote, tmp_path / "cache", size=1 << 40)
