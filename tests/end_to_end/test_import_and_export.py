"""What the page on import and export tells a reader to type works, and says what it did."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.markdown import code_blocks

from olm_data.dataset.dataset import Dataset
from olm_data.mixture.lock import Lock
from olm_data.mixture.olmo_core import OlmoCore

PAGE = "docs/how-to/import-and-export.md"


def test_the_page_imports_files_in_place_and_exports(repository: Path, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = f'olm-data() {{ "{sys.executable}" -m olm_data.cli "$@"; }}\n'
    script = command + "".join(code_blocks(repository / PAGE, "bash"))
    run = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=tmp_path,
        env=dict(os.environ, PATH=path, PYTHONPATH=str(repository), OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, f"{run.stdout[-3000:]}\n{run.stderr[-3000:]}"
    for folder in ("tokens/stories", "theirs", "tokens/guessed"):
        dataset = Dataset.open(str(tmp_path / folder))
        assert (dataset.documents, len(dataset.manifest.shards)) == (200, 2)
    first = tmp_path / "tokens" / "stories" / "shard-00000.tokens.bin"
    assert os.path.samefile(first, tmp_path / "theirs" / "part-0-00000.npy")
    assert "story-3" in run.stdout
    tales = tmp_path / "tokens" / "tales" / "shard-00000.tokens.bin"
    assert os.path.samefile(tales, tmp_path / "exported" / "megatron" / "shard-00000.bin")
    assert "tale-3" in run.stdout.splitlines()
    lock = Lock.read(tmp_path / "run.lock.json")
    assert (lock.olmo_core, lock.sources[0].rows) == (OlmoCore(batch_rows=4, chunk_rows=1), 60)
    (example,) = code_blocks(repository / PAGE, "python")
    exec(compile(example, PAGE, "exec"), {})
    assert "no .csv.gz; 100 documents found by EOS id" in run.stderr
