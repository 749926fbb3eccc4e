"""What a data loader of one's own need not write."""

from __future__ import annotations

import pytest
from support.own_data import Own

from olm_data.errors import UsageError
from olm_train.data.base import require_lock


def test_defaults_say_that_there_is_no_lock() -> None:
    loader = Own()
    assert loader.lock is None
    assert loader.rows_of_step(0).size == 0
    assert loader.order_digest(0) is None
    assert loader.skip == ()
    assert loader.tokens_before(3) == 24
    assert loader.ready(0.0)
    with pytest.raises(UsageError, match="rows can be left out of a mixture lock alone"):
        loader.leave_out([(0, 1)])
    with pytest.raises(UsageError, match="the callback x needs a mixture lock"):
        require_lock(loader, "the callback x")
