"""`olm-train evaluate --watch`: every whole checkpoint once, with the numbers of the run itself."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.eval_requests import make_task
from support.polling import wait_until
from support.runs import build_trainer, command, config_values, environment, metrics

from olm_data.extensions.watching.watched import WatchedEvaluation, WatchedTail
from olm_data.run_log.log import End, Start, append_end, append_start, is_over
from olm_data.storage.store import Store
from olm_train.checkpoint.manifest import complete_folders
from olm_train.checkpoint.portable import TrainedModel
from olm_train.extensions.downstream import watched_run
from olm_train.extensions.downstream.command import main
from olm_train.extensions.downstream.evaluation import EvaluationData
from olm_train.extensions.downstream.watched_run import Stop, Watch, names_of

pytestmark = pytest.mark.xdist_group("watched-run")  # its fixtures are made once
EVERY = "eval_interval: 2"


@pytest.fixture(scope="module")
def source(
    tiny_mixture: Path, tiny_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A run of six steps, saved and evaluated after every other one, with merged weights."""
    folder = tmp_path_factory.mktemp("watched")
    make_task(folder / "mine", tiny_tokenizer)
    callbacks = "--trainer.callbacks"
    build_trainer(
        tiny_mixture,
        folder / "run",
        "--trainer.hard_stop={value: 6, unit: steps}",
        f"{callbacks}.checkpointer={{save_interval: 2}}",
        f"{callbacks}.lm_evaluator.eval_interval=2",
        f"{callbacks}.lm_evaluator.by=[input]",
        f"{callbacks}.downstream_evaluator={{tasks: {{mine: {folder / 'mine'}}}, {EVERY}}}",
        f"{callbacks}.model_merge={{merge_step: [4], merge_last_n_steps: 2}}",
    ).fit()
    return folder


@pytest.fixture
def run(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source / "run", tmp_path / "run"))


def data(source: Path, lock: Path) -> list[str]:
    return ["--data", str(lock.parent / "held"), "--data", str(source / "mine")]


def watch(run: Path, *words: str) -> Result:
    return CliRunner().invoke(main, [str(run), "--watch", *words])


def in_loop(run: Path) -> dict[int, dict[str, dict[str, float]]]:
    found: dict[int, dict[str, dict[str, float]]] = {}
    for line in metrics(run):
        if "eval" in line:
            found.setdefault(line["step"], {}).update(line["eval"])
    return found


def read_all_watched(run: Path, notes: list[str]) -> list[WatchedEvaluation]:
    """All results of a run, by step; `notes` takes a remark on each file that cannot be read."""
    tail = WatchedTail(run)
    found = tail.read(now=True)
    notes += [f"{name} is left out: {why}" for name, why in tail.wrong.items()]
    return found


def test_every_checkpoint_has_the_numbers_of_the_run(
    run: Path, source: Path, tiny_mixture: Path
) -> None:
    done = watch(run, *data(source, tiny_mixture), "--by", "input")
    assert done.exit_code == 0, done.output
    expected, notes = in_loop(run), list[str]()
    found = read_all_watched(run, notes)
    assert notes == []
    names = ["step00000002", "step00000004", "step00000004-merged", "step00000006"]
    assert [each.checkpoint for each in found] == names
    for each in found:
        assert f"{each.checkpoint} evaluated" in done.stderr
        for name, values in each.logged.results.items():
            if name.startswith("merged/") and name not in expected[each.step]:
                continue
            logged = expected[each.step][name]
            for metric, value in values.items():
                assert value == pytest.approx(logged[metric], rel=1e-5), (each.checkpoint, metric)
            assert {m for m in logged if "change" not in m} == values.keys()
    assert any("input=" in metric for metric in found[0].results["held"])
    assert "merged/downstream/mine" in found[2].logged.results
    assert not list((run / "eval").glob("lease-*"))


def test_what_is_done_is_not_done_again_and_what_is_new_is(
    run: Path, source: Path, tiny_mixture: Path
) -> None:
    words = data(source, tiny_mixture)
    assert watch(run, *words[:2]).exit_code == 0
    before = {path.name: path.read_bytes() for path in (run / "eval").iterdir()}
    assert "evaluated" not in watch(run, *words[:2]).stderr
    assert before == {path.name: path.read_bytes() for path in (run / "eval").iterdir()}
    assert watch(run, *words).stderr.count("evaluated in") == 4  # the task is new
    for each in read_all_watched(run, []):
        assert list(each.results) == ["held", "downstream/mine"]
    again = watch(run, *words, "--sequence-length", "16")  # another way to measure
    assert again.stderr.count("evaluated in") == 4
    assert {m.sequence_length for e in read_all_watched(run, []) for m in e.data.values()} == {16}
    (run / "eval" / "step00000004.json").write_text("{")
    mended = watch(run, *words, "--sequence-length", "16")
    assert mended.stderr.count("evaluated in") == 1
    assert "it is written anew" in mended.stderr
    compared = watch(run, *words, "--sequence-length", "16", "--compare", str(run))
    assert compared.stderr.count("evaluated in") == 4
    last = read_all_watched(run, [])[-1].results["downstream/mine"]
    assert last["len_norm change"] == 0.0


def test_a_damaged_checkpoint_is_named_and_a_part_of_one_is_not_seen(
    run: Path, source: Path, tiny_mixture: Path
) -> None:
    folder = run / "step00000004" / "model_and_optim"
    tensors = next(path for path in folder.iterdir() if path.name != "index.json")
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"x")
    shutil.copytree(run / "step00000002", run / "step00000008-000001.tmp")
    shutil.copytree(run / "step00000002", run / "step00000010")
    (run / "step00000010" / "manifest.json").unlink()
    done = watch(run, *data(source, tiny_mixture)[:2])
    assert done.exit_code == 3
    assert "warning: step00000004 is not evaluated" in done.stderr
    assert "damaged checkpoints were not evaluated: step00000004" in done.stderr
    found = [each.checkpoint for each in read_all_watched(run, [])]
    assert found == ["step00000002", "step00000004-merged", "step00000006"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_checkpoint_that_goes_while_it_is_read_is_said_and_skipped(
    run: Path, source: Path, tiny_mixture: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    opened = watched_run.open_portable

    def removing(place: Any, name: str, *rest: Any, **options: Any) -> TrainedModel:
        if name == "step00000004" and when == "before":
            shutil.rmtree(run / name)
        found = opened(place, name, *rest, **options)
        if name == "step00000004":
            shutil.rmtree(run / name)
        return found

    monkeypatch.setattr(watched_run, "open_portable", removing)
    done = watch(run, *data(source, tiny_mixture)[:2])
    assert done.exit_code == 0, done.output
    assert "note: step00000004 was removed while it was read" in done.stderr
    found = [each.checkpoint for each in read_all_watched(run, [])]
    assert found == ["step00000002", "step00000004-merged", "step00000006"]


def watcher(run: Path, place: str, say: Callable[[str], None], stop: Stop) -> Watch:
    return Watch(str(run), lambda found: EvaluationData(found, [place]), say, stop)


def test_two_watchers_share_the_checkpoints_and_do_none_twice(
    run: Path, tiny_mixture: Path
) -> None:
    held, said, both = str(tiny_mixture.parent / "held"), list[str](), threading.Barrier(2)

    def follow() -> None:
        both.wait(600)
        watcher(run, held, said.append, Stop()).follow()

    threads = [threading.Thread(target=follow) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    done = [line.partition(" evaluated in")[0] for line in said if " evaluated in" in line]
    assert sorted(done) == complete_folders(run)


def test_it_waits_for_a_run_that_goes_on_and_leaves_off_where_it_is_told_to(
    run: Path, tiny_mixture: Path
) -> None:
    (run / "ends.jsonl").unlink()
    said, stop, held = list[str](), Stop(), str(tiny_mixture.parent / "held")

    def say(text: str) -> None:
        said.append(text)
        if "step00000006 evaluated" in text:
            stop.set()

    watcher(run, held, say, stop).follow()
    assert sum("evaluated in" in text for text in said) == 4
    again = Stop()
    empty = watcher(run.parent / "not-there", held, lambda text: again.set(), again)
    empty.follow()
    assert not (run.parent / "not-there").exists()


def test_a_run_is_over_when_its_last_start_finished(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    assert not is_over(store)

    def start(time: float) -> None:
        sizes = {"global_batch_size": 8, "world_size": 1, "skip": ()}
        append_start(tmp_path, Start(step=0, rewound=0, lock="", time=time, **sizes))

    start(1.0)
    assert not is_over(store)
    for time, reason, over in ((2.0, "stopped", False), (3.0, "failed", False)):
        append_end(tmp_path, End(step=1, time=time, reason=reason))  # type: ignore[arg-type]
        assert is_over(store) == over
    append_end(tmp_path, End(step=1, time=4.0, reason="finished"))
    assert is_over(store)
    with (tmp_path / "ends.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "ti')  # is being written
    assert is_over(store)
    start(5.0)
    assert not is_over(store)


def test_what_has_no_meaning_with_it_is_refused(
    run: Path, source: Path, tiny_mixture: Path
) -> None:
    words = data(source, tiny_mixture)
    for more, says in ((["--json"], "--json"), (["--checkpoint", "2"], "--checkpoint")):
        refused = watch(run, *words, *more)
        assert refused.exit_code == 2
        assert f"leave {says} out" in refused.stderr
    assert "nothing to watch" in watch(run / "step00000002", *words).stderr
    twice = watch(run, *words, "--data", str(tiny_mixture.parent / "held") + "/")
    assert "two of the data are called held" in twice.stderr
    assert names_of({"a/b/": False, "c/b": True}) == {"b": "a/b/", "downstream/b": "c/b"}


def process(run: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "olm_train.cli", "evaluate", str(run), "--watch", *words],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_watcher_beside_a_run_is_killed_goes_on_and_ends_with_it(
    tiny_mixture: Path, source: Path, tmp_path: Path
) -> None:
    values = config_values(tiny_mixture, tmp_path / "run")
    callbacks = values["trainer"]["callbacks"]
    callbacks["checkpointer"] = {"save_interval": 3}
    callbacks["lm_evaluator"]["eval_interval"] = 3
    config = tmp_path / "train.yaml"
    config.write_text(json.dumps(values))
    words = data(source, tiny_mixture)
    first = process(tmp_path / "run", *words)  # before there is a run
    others: list[subprocess.Popen[Any]] = [first]
    try:
        assert first.stderr is not None
        assert "no checkpoint" in first.stderr.readline()
        training = subprocess.Popen(command(config), env=environment(), stderr=subprocess.DEVNULL)
        others.append(training)
        for line in first.stderr:
            if "evaluated in" in line:
                break
        first.kill()
        first.wait(600)
        second, third = process(tmp_path / "run", *words), process(tmp_path / "run", *words)
        others += [second, third]
        ended = [each.communicate(timeout=600)[1] for each in (second, third)]
        assert training.wait(600) == 0
        assert [second.returncode, third.returncode] == [0, 0], ended
    finally:
        for each in others:
            each.kill()
            each.wait()
    expected, notes = in_loop(tmp_path / "run"), list[str]()
    found = read_all_watched(tmp_path / "run", notes)
    assert notes == []
    assert [each.step for each in found] == [3, 6, 9, 12, 15, 18, 21, 24]
    for each in found:
        logged, here = expected[each.step]["held"], each.results["held"]
        assert here["CE loss"] == pytest.approx(logged["CE loss"], rel=1e-5)
    lines = "".join(ended).splitlines()
    names = [line.partition(" evaluated in")[0] for line in lines if " evaluated in" in line]
    assert len(names) == len(set(names))  # none twice


@pytest.mark.slow
def test_sigterm_ends_a_watcher_in_the_middle_and_nothing_is_left_behind(
    run: Path, source: Path, tiny_mixture: Path
) -> None:
    (run / "ends.jsonl").unlink()
    it = process(run, *data(source, tiny_mixture))
    try:
        assert it.stderr is not None
        it.stderr.readline()  # the first is evaluated, another begins
        it.send_signal(signal.SIGTERM)
        assert it.wait(600) == 0
    finally:
        it.kill()
        it.communicate()
    assert 1 <= len(read_all_watched(run, [])) <= 4
    assert not [name for name in os.listdir(run / "eval") if not name.startswith("step")]


@pytest.mark.slow
def test_a_run_in_a_store_is_watched(
    run: Path, tiny_mixture: Path, s3: dict[str, str], tmp_path: Path
) -> None:
    store = Store(f"s3://{s3['bucket']}/{tmp_path.name}/run")
    for path in sorted(run.rglob("*")):
        if path.is_file():
            store.put(str(path.relative_to(run)), path.read_bytes())
    held = str(tiny_mixture.parent / "held")
    done = CliRunner().invoke(main, [store.root, "--watch", "--data", held])
    assert done.exit_code == 0, done.output
    names = sorted(name for name in store.child("eval").sizes())
    assert names == sorted(f"{name}.json" for name in complete_folders(run))


@pytest.mark.slow
def test_a_trainer_that_is_killed_at_a_save_leaves_nothing_that_is_evaluated(
    tiny_mixture: Path, source: Path, tmp_path: Path
) -> None:
    script = tmp_path / "killed.py"
    script.write_text(
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from support.runs import build_trainer\n"
        "from olm_train.checkpoint import save\n"
        "write = save.Manifest.encode\n"
        "def killed(self):\n"
        "    if self.step == 4:\n"
        "        os.kill(os.getpid(), signal.SIGKILL)  # all files but the manifest are there\n"
        "    return write(self)\n"
        "save.Manifest.encode = killed\n"
        "build_trainer(Path(sys.argv[1]), Path(sys.argv[2]),\n"
        "    '--trainer.callbacks.checkpointer={save_interval: 2}').fit()\n"
    )
    tests = str(Path(__file__).parents[3])
    env = {**environment(), "PYTHONPATH": f"{environment()['PYTHONPATH']}:{tests}"}
    run = tmp_path / "run"
    killed = subprocess.run(
        [sys.executable, str(script), str(tiny_mixture), str(run)], env=env, capture_output=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [path for path in run.iterdir() if path.name.startswith("step00000004")]
    stop, said = Stop(), list[str]()
    watching = threading.Thread(
        target=watcher(run, str(tiny_mixture.parent / "held"), said.append, stop).follow
    )
    watching.start()
    try:
        wait_until(lambda: any("step00000002 evaluated" in text for text in said), "an evaluation")
    finally:
        stop.set()
        watching.join(600)
    assert [each.step for each in read_all_watched(run, [])] == [2]


def test_a_run_that_is_moved_away_while_it_is_read_gets_no_folder_in_its_place(
    run: Path, source: Path, tiny_mixture: Path
) -> None:
    said, stop = list[str](), Stop()
    (run / "ends.jsonl").unlink()

    def say(text: str) -> None:
        said.append(text)
        if "any more" in text:
            stop.set()

    def moved(found: TrainedModel) -> EvaluationData:
        run.rename(run.parent / "elsewhere")
        return EvaluationData(found, [str(tiny_mixture.parent / "held")])

    Watch(str(run), moved, say, stop).follow()
    assert said[0] == "note: step00000002 was removed while it was read"
    assert said[-1] == f"note: there is no checkpoint in {run} any more"
    assert not run.exists()
    assert not (run.parent / "elsewhere/eval").exists()
