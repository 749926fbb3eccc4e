"""What a lock's summary warns of."""

from __future__ import annotations

from support.stand_in import MANIFEST, compiled

from olm_data.mixture.summary import warnings


def test_rounded_shares_are_recorded_beside_the_wanted_ones_and_reported() -> None:
    text = MANIFEST.replace("web: 85, code: 15", "web: 1000003, code: 770.7")
    lock = compiled(text)
    assert lock.stages[0].wanted == ("7707/10007737", "10000030/10007737")
    assert lock.stages[0].block <= 2**20
    assert any("largest relative error" in warning for warning in warnings(lock))
    assert not any("largest relative error" in text for text in warnings(compiled(MANIFEST)))


def test_above_four_epochs_a_warning_says_how_many() -> None:
    lock = compiled(MANIFEST.replace("max_epochs: 4", "max_epochs: 9"), tokens=15_000_000)
    assert any("'web' is repeated 5.5" in warning for warning in warnings(lock))


def test_a_weighted_source_that_is_never_drawn_and_an_unused_source_are_warned_about() -> None:
    lock = compiled(MANIFEST.replace("web: 85, code: 15", "web: 1000000000, code: 1"))
    assert any("'code' is never drawn in stage 'main'" in w for w in warnings(lock))
    text = MANIFEST.replace("web: 85, code: 15", "web: 1").replace("web: 2M, code: 3M", "web: 5M")
    lock = compiled(text)
    assert any("'code' has a weight in no stage" in w for w in warnings(lock))
