"""Does each project's own reader find our documents in what `olm-data export` writes?

    python benchmarks/check_exports.py tokens/books tokens/web
    python benchmarks/check_exports.py tokens/books --only megatron,mds --peer-envs ./envs

For each dataset (small: every document is read) and each format: export, read it in the project's
own environment, made on first use from the package registry, and compare with the documents that
`Dataset` reads. Prints `same`, or `NOT SAME` with the first documents that differ; exits 1 then.

    dataset -> olm-data export -> folder -> exports/readers.py in another environment -> digests
    dataset -> Dataset.document          -> digests                                   -> compared
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

BENCHMARKS = Path(__file__).resolve().parent
sys.path[:0] = [str(BENCHMARKS.parent), str(BENCHMARKS)]

from exports.readers import digest  # noqa: E402
from peers.environments import (  # noqa: E402
    NotInstalled,
    default_root,
    last_line,
    python_of,
    version_of,
)

from olm_data.dataset.dataset import Dataset  # noqa: E402
from olm_data.extensions.exporting.export import export  # noqa: E402

READER_SECONDS = 1200
TORCH = ("torch==2.13.0",)


@dataclass(frozen=True)
class Project:
    """A project whose reader is run; see `peers.environments.Installed`."""

    environment: str
    package: str
    installs: tuple[tuple[str, ...], ...]
    form: str
    holds_ids: bool


PROJECTS = (
    Project("olmo-core", "ai2-olmo-core", (TORCH, ("ai2-olmo-core",)), "olmo-core", False),
    Project("megatron", "megatron-core", (TORCH, ("megatron-core",)), "megatron", False),
    Project("datatrove", "datatrove", (TORCH, ("datatrove[io]", "tokenizers")), "datatrove", False),
    Project("mosaicml", "mosaicml-streaming", ((*TORCH, "mosaicml-streaming"),), "mds", True),
    Project("litdata", "litdata", ((*TORCH, "litdata"),), "litdata", True),
    Project("datasets", "datasets", (("datasets",),), "hf", True),
)


def ours(dataset: Dataset) -> tuple[list[list[Any]], np.ndarray]:
    """Return [id, digest of the ids] of each document, and all ids."""
    found = [dataset.document(number) for number in range(dataset.documents)]
    return [[d.id or "", digest(d.tokens)] for d in found], dataset.read(0, dataset.tokens)


def compare(said: dict[str, Any], wanted: list[list[Any]], ids: np.ndarray, holds: bool) -> str:
    """Return `same` with what was compared, or `NOT SAME` and why."""
    if "stream" in said:
        if said["stream"] == digest(ids[: said["tokens"]]):
            return f"same {said['tokens']:,} tokens"
        return f"NOT SAME: the first {said['tokens']:,} tokens"
    if "documents" not in said:
        verdict = "same" if said["tokens"] == len(ids) else "NOT SAME:"
        return f"{verdict} {said['tokens']:,} tokens of {len(ids):,}"
    found = [[id or "" if holds else None, value] for id, value in said["documents"]]
    expected = [[id if holds else None, value] for id, value in wanted]
    if found == expected:
        return f"same {len(found):,} documents" + (" and ids" if holds else "")
    differ = [k for k, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]]
    return (
        f"NOT SAME: {len(found):,} documents, not {len(expected):,}; "
        f"{len(differ):,} differ, the first are {differ[:5]}"
    )


def check(dataset: Dataset, project: Project, root: Path) -> list[str]:
    """Export for one project, read with its reader, and return a line for each view of it."""
    python = python_of(project, root)
    version = f"{project.package} {version_of(project, python)}"
    wanted, ids = ours(dataset)
    with tempfile.TemporaryDirectory(dir=Path(dataset.store.root).parent) as folder:
        output, start = Path(folder, "exported"), time.perf_counter()
        done = export(dataset.store.root, project.form, str(output))
        rate = done.tokens / (time.perf_counter() - start) / 1e6
        words = [project.form, str(output), dataset.dtype.name, str(dataset.eos)]
        run = subprocess.run(
            [str(python), str(BENCHMARKS / "exports" / "readers.py"), *words],
            capture_output=True,
            text=True,
            timeout=READER_SECONDS,
            check=False,
        )
    how = f"{done.linked} shards linked" if done.linked else f"{rate:,.0f} M tokens/s"
    head = f"{project.form:10} {version:26} {how:18}"
    views = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    lines = [f"{head} {v['view']:38} {compare(v, wanted, ids, project.holds_ids)}" for v in views]
    if run.returncode or not views:
        lines.append(f"{head} NOT SAME: the reader failed: {last_line(run.stderr)}")
    return lines


def main() -> None:
    """Check every project on every dataset."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("datasets", nargs="+", help="folders of small datasets with an EOS")
    parser.add_argument("--only", help="names of projects, by commas")
    parser.add_argument("--peer-envs", type=Path, default=default_root(), help="environments")
    arguments = parser.parse_args()
    only = set((arguments.only or "").split(",")) - {""}
    unknown = only - {project.environment for project in PROJECTS}
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {[p.environment for p in PROJECTS]}")
    differs = False
    for folder in arguments.datasets:
        dataset = Dataset.open(folder)
        print(f"{folder}: {dataset.documents:,} documents, {dataset.tokens:,} {dataset.dtype.name}")
        for project in PROJECTS:
            if only and project.environment not in only:
                continue
            try:
                lines = check(dataset, project, arguments.peer_envs)
            except NotInstalled as error:
                lines = [f"{project.form:10} NOT SAME: not installed: {error}"]
            print("\n".join(lines), flush=True)
            differs = differs or any("NOT SAME" in line for line in lines)
    sys.exit(1 if differs else 0)


if __name__ == "__main__":
    main()
