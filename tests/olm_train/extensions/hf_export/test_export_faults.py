"""Exports where things go wrong or are elsewhere: kills, buckets, ranks, memory."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import WITH_TESTS
from support.distributed import run_ranks
from support.forked import forked
from support.hf_exports import OLMO2, QUIET, receipt_of, trained
from support.polling import wait_until
from support.runs import build_trainer, environment, group_world

from olm_data.errors import ConflictError
from olm_data.storage.destination import RECORD
from olm_data.storage.store import Store
from olm_train.checkpoint.load import Checkpoint, open_checkpoint
from olm_train.distributed.world import World
from olm_train.extensions.hf_export.export import export
from olm_train.extensions.hf_export.job import ExportOptions

pytestmark = pytest.mark.slow  # servers, ranks and processes that are killed
OPTIONS = ExportOptions(dtype="float32", shard_bytes=20_000, check="files")


@pytest.fixture(scope="module")
def checkpoint(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return trained(tiny_mixture, tmp_path_factory.mktemp("faults") / "run", OLMO2)


def _rank(lock: Path, folder: Path, model: str) -> None:
    fsdp = "--train_module.dp_config={name: fsdp}"
    build_trainer(lock, folder, f"--model={{{model}}}", *QUIET, fsdp, world=group_world()).fit()


def test_a_checkpoint_of_two_sharded_ranks_is_exported_as_that_of_one(
    tiny_mixture: Path, tmp_path: Path
) -> None:
    run_ranks(_rank, 2, tiny_mixture, tmp_path / "run", OLMO2)
    sharded = open_checkpoint(tmp_path / "run" / "step00000002", World())
    assert len(sharded.index.files) == 2
    whole = export(sharded, str(tmp_path / "hf"), OPTIONS).receipt
    assert whole.model_class == "Olmo2ForCausalLM"
    computed = export(sharded, str(tmp_path / "bf16"), ExportOptions(check="transformers")).receipt
    assert computed.verified.model is not None
    assert computed.verified.model.loss is not None
    # the same bytes as of the checkpoint that one process writes of these weights
    copy = tmp_path / "one"
    words = ("merge", sharded.folder, "--out", copy)
    assert forked("olm_train.cli", *words, environment=environment()).returncode == 0
    single = export(open_checkpoint(copy, World()), str(tmp_path / "single"), OPTIONS).receipt
    assert single.tensors == whole.tensors


def test_in_a_bucket_the_export_is_whole_and_the_same(
    checkpoint: Checkpoint, s3: dict[str, str], tmp_path: Path
) -> None:
    url = f"s3://{s3['bucket']}/exports/one"
    far = export(checkpoint, url, OPTIONS).receipt
    near = export(checkpoint, str(tmp_path / "near"), OPTIONS).receipt
    assert far == near
    store = Store(url)
    names = {entry.name: entry.modified for entry in store.entries()}
    assert set(names) == {*far.files, RECORD}
    for name, file in far.files.items():
        assert store.sha256(name) == file.sha256
    assert export(checkpoint, url, OPTIONS).already
    with pytest.raises(ConflictError, match="holds something else"):
        export(checkpoint, url, ExportOptions(check="files"))
    computed = ExportOptions(dtype="float32", check="transformers")
    proved = export(checkpoint, f"{url}-computed", computed).receipt
    assert proved.verified.model is not None


def _killed(checkpoint: Checkpoint, output: str, after: float) -> int:
    """Start the command, kill it so many seconds after its first shard; return its exit code."""
    command = ["olm_train.cli", "export", checkpoint.folder, "--to", "hf", "--output", output]
    options = ["--dtype", "float32", "--shard-size", "2KB", "--verify", "files"]
    child = subprocess.Popen(
        [sys.executable, "-m", *command, *options],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: child.poll() is not None or _begun(output), "a start", seconds=600)
        child.wait(after)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGKILL)
    return child.wait()


def _begun(output: str) -> bool:
    if "://" in output:
        return bool(Store(output).entries())
    return any(Path(output).parent.glob(f".{Path(output).name}.exporting-0*"))


@pytest.mark.parametrize("where", ["local", "bucket"])
def test_a_kill_leaves_nothing_that_reads_as_whole_and_a_rerun_goes_on(
    checkpoint: Checkpoint, s3: dict[str, str], tmp_path: Path, where: str
) -> None:
    output = str(tmp_path / "hf") if where == "local" else f"s3://{s3['bucket']}/killed/hf"
    options = ExportOptions(dtype="float32", shard_bytes=2_000, check="files")
    rule = random.Random(len(where))
    for _ in range(4):
        code = _killed(checkpoint, output, rule.uniform(0.0, 0.2 if where == "local" else 1.5))
        there = Path(output).exists() if where == "local" else Store(output).exists(RECORD)
        if there:  # the kill came after the last write
            assert export(checkpoint, output, options).already
            break
        assert code == -signal.SIGKILL
    receipt = export(checkpoint, output, options).receipt
    whole = export(checkpoint, str(tmp_path / "whole"), options).receipt
    assert receipt == whole
    if where == "local":
        left = {path.name for path in tmp_path.iterdir()} - {"hf", "whole"}
        assert all(name.startswith(".hf.exporting-lease-") for name in left)
        assert receipt_of(Path(output)) == whole
    else:
        left = {e.name for e in Store(output).entries()} - {*whole.files, RECORD}
        assert all(name.startswith(".") for name in left)  # a claim, a lease of one that was killed


MEASURE = """
import sys
from support.memory import peak
from olm_train.checkpoint.load import open_checkpoint
from olm_train.distributed.world import World
from olm_train.extensions.hf_export.export import export
from olm_train.extensions.hf_export.job import Options
from transformers import AutoTokenizer, PreTrainedTokenizerFast  # which the ids are compared with
found = open_checkpoint(sys.argv[1], World())
before = peak()
export(found, sys.argv[2], Options(dtype="float32", shard_bytes=int(sys.argv[3]), check="files"))
print(before, peak())
"""


def test_memory_is_about_one_file_and_one_tensor(tiny_mixture: Path, tmp_path: Path) -> None:
    large = "d_model: 512, n_layers: 6, n_heads: 8, feed_forward: {hidden_size: 2048}"
    folder = trained(tiny_mixture, tmp_path / "run", large)
    weights = 4 * sum(
        entry.elements for n, entry in folder.index.tensors.items() if n.startswith("model.")
    )
    shard = 8_000_000
    assert weights > 12 * shard
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, folder.folder, str(tmp_path / "hf"), str(shard)],
        env=environment() | WITH_TESTS, capture_output=True, text=True, check=True, timeout=600,
    )  # fmt: skip
    before, peak = (1024 * int(number) for number in done.stdout.split())
    tensor = 4 * 512 * 2048
    # read, put in place, given to the file: three copies of one tensor, and a file read back
    assert peak - before < shard + 4 * tensor + 30_000_000 < weights
    assert json.loads((tmp_path / "hf" / "olm-export.json").read_text())["verified"]
