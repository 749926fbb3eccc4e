"""What a ladder costs and tells, before it is trained; designs that tell nothing are refused."""

from __future__ import annotations

from pathlib import Path
from shutil import copy
from typing import Any

import numpy as np
import pytest
import yaml
from support.runs import MANIFEST, config_values

import olm_data
from olm_data.errors import InputError, UsageError
from olm_data.printing import lines
from olm_train.extensions.ladder.config import LadderConfig
from olm_train.extensions.ladder.design import Design
from olm_train.extensions.ladder.forecast import forecast
from olm_train.extensions.ladder.law import EPOCH, fit
from olm_train.extensions.ladder.plan import plan, resolved
from olm_train.run.dry_run import describe

from .test_law import SIZES, TOKENS, runs_of


def write_ladder(folder: Path, lock: Path, **fields: Any) -> str:
    """Write a ladder of three widths and three lengths, WSD with decays of a quarter."""
    base = config_values(lock, folder / "base")
    wsd = {"name": "wsd", "warmup": 2, "decay_fraction": 0.25}
    base["train_module"]["scheduler"] = wsd
    (folder / "train.yaml").write_text(yaml.safe_dump(base))
    tokens = [{"value": value, "unit": "tokens"} for value in (1024, 2048, 4096)]
    given: dict[str, Any] = {
        "base": "train.yaml",
        "folder": "ladder",
        "sizes": [{"model.d_model": width} for width in (8, 16, 32)],
        "tokens": tokens,
        **fields,
    }
    path = folder / "ladder.yaml"
    path.write_text(yaml.safe_dump(given))
    return str(path)


def test_predicted_errors_are_those_that_fits_have() -> None:
    design = Design(SIZES, TOKENS, EPOCH, 0.003)
    found = np.array([fit(runs_of(EPOCH, 0.003, seed)) for seed in range(60)])
    errors = design.errors()
    assert np.std(found[:, 2]) / EPOCH.alpha == pytest.approx(errors["alpha"], rel=0.35)
    assert np.std(found[:, 4]) / EPOCH.beta == pytest.approx(errors["beta"], rel=0.35)
    (slope,) = design.slopes(np.array([7e9]), np.array([140e9]))
    forecast_error = np.sqrt(slope @ design.covariance() @ slope)
    assert forecast_error == pytest.approx(0.0075, abs=0.0005)


@pytest.mark.parametrize(
    ("tokens", "why"),
    [(0 * SIZES + 1e9, "same tokens"), (20 * SIZES, "same tokens for each parameter")],
)
def test_a_design_that_keeps_the_exponents_together_says_what_does(
    tokens: np.ndarray, why: str
) -> None:
    assert any(why in text for text in Design(SIZES, tokens).problems())


def test_the_point_to_add_is_the_cheapest_that_separates_them() -> None:
    sizes = np.array([2e7, 6e7, 2e8, 6e8, 6e8])
    design = Design(sizes, 20 * sizes * [1, 1, 1, 1, 4], noise=0.001)
    candidates = [(n, n * r) for n in (2e7, 6e7) for r in (5.0, 80.0, 320.0)]
    best = design.cheapest(candidates)
    assert best is not None
    cheaper = [c for c in candidates if c[0] * c[1] < best[0] * best[1]]
    assert all(design.with_run(*each).problems() for each in cheaper)
    assert design.with_run(*best).information() > design.information()


def test_points_have_sizes_costs_and_trunks(tiny_mixture: Path, tmp_path: Path) -> None:
    found = plan(LadderConfig.read(write_ladder(tmp_path, tiny_mixture)))
    assert len(found.points) == 9
    trunk, middle, short = found.points[:3]
    assert (trunk.steps, middle.steps, short.steps) == (16, 8, 4)
    assert (trunk.first, middle.first, short.first) == (0, 6, 3)
    assert middle.begins == short.begins == trunk.name
    assert middle.flops == pytest.approx(trunk.flops / 8)
    assert middle.whole_flops == pytest.approx(trunk.flops / 2)
    assert trunk.flops > 6 * trunk.parameters * 0.5 * trunk.tokens
    assert found.flops == pytest.approx(sum(p.flops for p in found.points))
    head = next(line.split() for line in lines(found) if "FLOPs" in line)
    assert head == ["name", "parameters", "tokens", "steps", "FLOPs", "hours", "from"]


def test_without_a_stable_phase_each_point_begins_at_the_first_step(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    path = write_ladder(tmp_path, tiny_mixture)
    base = yaml.safe_load((tmp_path / "train.yaml").read_text())
    base["train_module"]["scheduler"] = {"name": "cosine_with_warmup", "warmup": 2}
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(base))
    assert {point.begins for point in plan(LadderConfig.read(path)).points} == {""}


def test_another_configuration_is_another_point(tiny_mixture: Path, tmp_path: Path) -> None:
    path = write_ladder(tmp_path, tiny_mixture)
    before = plan(LadderConfig.read(path)).points
    base = yaml.safe_load((tmp_path / "train.yaml").read_text())
    base["train_module"]["optim"]["weight_decay"] = 0.2
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(base))
    after = plan(LadderConfig.read(path)).points
    assert not {p.digest for p in before} & {p.digest for p in after}
    assert not {p.name for p in before} & {p.name for p in after}


def test_one_length_is_refused_with_the_point_to_add(tiny_mixture: Path, tmp_path: Path) -> None:
    one = [{"value": 4096, "unit": "tokens"}]
    with pytest.raises(InputError, match="cannot separate") as caught:
        plan(LadderConfig.read(write_ladder(tmp_path, tiny_mixture, tokens=one)))
    assert "same tokens" in str(caught.value)
    assert "parameters x" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"tokens": [{"value": 3, "unit": "epochs"}]}, "in tokens or chinchilla"),
        ({"tokens": [{"value": 10**6, "unit": "tokens"}]}, "the mixture lock holds"),
        ({"dataset": "hold"}, "judged by a held-out set"),
        ({"sizes": [{"model.d_model": 8}, {"model.d_model": 8}]}, "the same run"),
        ({"sizes": []}, "sizes"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    tiny_mixture: Path, tmp_path: Path, fields: dict[str, Any], what: str
) -> None:
    with pytest.raises(UsageError, match=what):
        plan(LadderConfig.read(write_ladder(tmp_path, tiny_mixture, **fields)))


def test_a_run_is_as_long_and_costs_as_much_as_its_dry_run_says(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    """Where it stops before its end, skips rows, and has phases of other sequence lengths."""
    manifest = yaml.safe_load(MANIFEST)
    manifest["stages"][0]["sequence_length"] = 8
    for source in manifest["sources"].values():
        source["data"] = str(tiny_mixture.parent / source["data"])
    (tmp_path / "phased.yaml").write_text(yaml.safe_dump(manifest))
    lock = tmp_path / "phased.lock.json"
    olm_data.mix(tmp_path / "phased.yaml", lock)
    ladder = LadderConfig.read(write_ladder(tmp_path, tiny_mixture))
    Path(ladder.folder).mkdir()
    copy(Path(__file__).with_name("ladder.jsonl"), ladder.folder)
    options = [f"--data_loader.mixture={lock}", "--data_loader.skip=[[0, 8]]"]
    options += ["--trainer.hard_stop={value: 20, unit: steps}"]
    config = resolved(ladder.base, tuple(options))
    said = describe(config, 1)
    found = forecast(ladder, ladder.base, tuple(options), far=True)
    assert found.tokens == 20 * 256
    assert f"20 steps of 256 tokens: {found.tokens:,} tokens" in said
    assert f"{found.flops:.3e} in all" in said
    whole = forecast(ladder, ladder.base, tuple(options[:2]), far=True)
    assert whole.tokens == 23 * 256
