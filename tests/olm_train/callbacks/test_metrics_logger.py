"""metrics.jsonl: exact numbers, each step once, whatever was in the file before."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from support.full_disk import files_of_at_most
from support.runs import build_trainer, metrics, steps_of

from olm_data.errors import ResourceError
from olm_data.run_log.log import read_ends, read_starts
from olm_train.callbacks.base import Callback
from olm_train.distributed.preempt import Preempted, StopRequest


def test_numbers_are_the_floats_of_the_device(tiny_mixture: Path, tmp_path: Path) -> None:
    trainer = build_trainer(tiny_mixture, tmp_path, stop=3)
    step, seen = trainer.train_module.train_step, []

    def watched(*arguments: object, **options: object) -> object:
        result = step(*arguments, **options)  # type: ignore[arg-type]
        seen.append({name: float(value) for name, value in result.items()})
        assert seen[-1].pop("optim/non-finite") == 0  # logged where it is 1, see row 57
        return result

    trainer.train_module.train_step = watched  # type: ignore[method-assign,assignment]
    trainer.fit()
    written = steps_of(tmp_path)
    for number, (line, expected) in enumerate(zip(written, seen, strict=True), start=1):
        assert line == {
            "step": number,
            "tokens": 256 * number,
            "rows": [8 * number - 8, 8 * number],
            "order": trainer.data_loader.order_digest(number - 1),
            **expected,
        }


def test_a_new_run_does_not_go_on_in_an_old_file(tiny_mixture: Path, tmp_path: Path) -> None:
    lines = [{"step": n, "tokens": 9 * n, "rows": [n, n + 1]} for n in range(4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    build_trainer(tiny_mixture, tmp_path, stop=2).fit()
    steps = [line["step"] for line in steps_of(tmp_path)]
    assert steps == [1, 2]


def test_a_resume_tells_what_the_log_has_lost(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(steps: int) -> str:
        build_trainer(tiny_mixture, tmp_path, stop=steps).fit()
        return capsys.readouterr().err

    assert "warning:" not in run(2) + run(3)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join([lines[0], *lines[2:]]) + '{"step": 4')
    with (tmp_path / "starts.jsonl").open("a") as file:
        file.write('{"step"')
    said = run(4)
    for part in (
        "metrics.jsonl has no line of step 2",
        "metrics.jsonl is cut off after 10 bytes",
        "starts.jsonl is cut off after 7 bytes",
    ):
        assert f"{part}" in said
    (tmp_path / "metrics.jsonl").unlink()
    assert "metrics.jsonl is missing" in run(5)
    for name in ("metrics.jsonl", "starts.jsonl"):
        (tmp_path / name).unlink()
    assert "metrics.jsonl and starts.jsonl are missing or empty: what was trained" in run(6)


def test_each_start_says_how_it_ended(
    tiny_mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "abcdefgh12345678")
    ended = []

    def run(steps: int, *, at: int = 0, error: BaseException | None = None) -> None:
        class Ends(Callback):
            def post_step(self) -> None:
                if self.trainer.step == at and error is not None:
                    raise error
                if self.trainer.step == at:
                    self.trainer.cancel_run("it is low enough", by="my_rule")

        trainer = build_trainer(tiny_mixture, tmp_path, stop=steps, callbacks={"ends": Ends()})
        with contextlib.suppress(ValueError, Preempted):
            trainer.fit()
        end = read_ends(tmp_path)[-1]
        assert end.time > 1e9
        ended.append((end.step, end.reason, end.by, end.why))

    run(2)
    run(9, at=3, error=ValueError("no such key abcdefgh12345678\n\x1b[31m"))
    request = StopRequest(code=15, rank=0, by="SIGTERM")
    run(9, at=4, error=Preempted(request, 4))
    run(9, at=5)
    assert ended == [
        (2, "finished", "", ""),
        (3, "failed", "ValueError", "no such key ***\\n\\x1b[31m"),
        (4, "stopped", "SIGTERM", ""),
        (5, "cancelled", "my_rule", "it is low enough"),
    ]
    assert len(read_ends(tmp_path)) == len(read_starts(tmp_path)) == 4


def test_an_end_that_the_disk_refuses_is_a_warning(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ends.jsonl").mkdir()
    build_trainer(tiny_mixture, tmp_path, stop=1).fit()
    assert "warning: ends.jsonl could not be written" in capsys.readouterr().err


def test_a_run_that_was_killed_after_its_last_save_gets_its_end(
    tiny_mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_trainer(tiny_mixture, tmp_path, stop=2).fit()
    (tmp_path / "ends.jsonl").unlink()
    before = metrics(tmp_path)
    for message in ("still to do: its end in ends.jsonl", "nothing to do"):
        build_trainer(tiny_mixture, tmp_path, stop=2).fit()
        assert f"already finished at step 2: {message}\n" in capsys.readouterr().err
    assert [(end.step, end.reason) for end in read_ends(tmp_path)] == [(2, "finished")]
    assert metrics(tmp_path) == before


def test_lines_that_a_full_disk_refuses_to_the_end_are_exit_5_also_without_a_checkpoint(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    class Full(Callback):
        def pre_step(self, batches: object) -> None:
            if self.trainer.step == 1:
                size = (tmp_path / "metrics.jsonl").stat().st_size
                disk.enter_context(files_of_at_most(size + 10))

    off = "--trainer.callbacks.checkpointer.enabled=false"
    log = "--trainer.metrics_collect_interval=1"
    trainer = build_trainer(tiny_mixture, tmp_path, off, log, stop=3, callbacks={"full": Full()})
    trainer.say = lambda message: None  # type: ignore[method-assign]  # pytest's file is limited too
    with contextlib.ExitStack() as disk, pytest.raises(ResourceError) as caught:
        trainer.fit()
    assert caught.value.exit_code == 5
    assert "metrics.jsonl" in str(caught.value)
