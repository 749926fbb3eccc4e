"""Row 62: other versions than those of the run are said at a resume; --strict-env refuses them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.runs import build_trainer

from olm_data.errors import ValidationError

STOP = "--trainer.hard_stop={value: 6, unit: steps}"
STRICT = "--trainer.callbacks.environment.strict=true"
CODE = "--trainer.callbacks.environment.snapshot=a1"


def test_62_a_difference_is_said_and_strict_refuses(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_trainer(tiny_mixture, tmp_path, STOP, CODE).fit()
    path = tmp_path / "environment.json"
    ours = json.loads(path.read_text())
    assert {"python", "device", "package torch", "package numpy"} <= ours.keys()
    path.write_text(json.dumps({**ours, "package torch": "1.0"}))
    before = (tmp_path / "starts.jsonl").read_bytes(), (tmp_path / "metrics.jsonl").read_bytes()
    change = f"package torch: '1.0' -> {ours['package torch']!r}"
    with pytest.raises(ValidationError, match="environment is not that of the run") as refused:
        build_trainer(tiny_mixture, tmp_path, STRICT, CODE).fit()
    assert change in str(refused.value)
    assert before == (
        (tmp_path / "starts.jsonl").read_bytes(),
        (tmp_path / "metrics.jsonl").read_bytes(),
    )
    capsys.readouterr()
    goes_on = "--trainer.hard_stop={value: 7, unit: steps}"
    build_trainer(tiny_mixture, tmp_path, goes_on, CODE).fit()
    assert f"note: changed since the last start: {change}\n" in capsys.readouterr().err
    goes_on = goes_on.replace("7", "8")
    build_trainer(tiny_mixture, tmp_path, STRICT, CODE, goes_on).fit()  # the same now
    with pytest.raises(ValidationError, match="code: 'a1' -> 'b2'"):
        build_trainer(tiny_mixture, tmp_path, STRICT, CODE.replace("a1", "b2")).fit()
