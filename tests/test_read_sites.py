"""No file is read past the bounded readers: every call that could is listed here with its reason.

`regular_files` opens, `Store` reads, `bounded_json` decodes. A new call of another kind fails this
test: use those, or say here why the file cannot be a stranger's. S5 and S8 of the audit.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from support.sources import modules, together, tree

pytestmark = together

READS = {
    "open", "os.open", "read_bytes", "read_text", "np.load", "np.memmap", "np.fromfile",
    "pq.ParquetFile", "pq.read_table", "pq.read_metadata", "json.load", "json.loads",
    "msgspec.json.decode", "msgspec.json.Decoder", "decode_typed", "decoder", "yaml.load",
    "pickle.load", "pickle.loads", "torch.load",
}  # fmt: skip

_OWN = "files that this process has just written in its own staging or scratch folder"
_PART = "a part of a file that bounded_json has checked as a whole"
_LOCKS = "locks and folders of our own making are opened to lock or fsync, not to read"

REASONS: dict[str, tuple[dict[str, int], str]] = {
    "olm_data/bounded_json.py": (
        {"msgspec.json.decode": 1, "decode_typed": 2, "open": 1},
        "the bounded reader itself; hashes staged files in pieces: " + _OWN,
    ),
    "olm_data/decoding.py": (
        {"msgspec.json.decode": 1, "msgspec.json.Decoder": 1, "decoder": 1},
        "what decode_typed and decoder call; their callers are in this list",
    ),
    "olm_data/parquet.py": ({"pq.ParquetFile": 3}, "the bounded reader of parquet files itself"),
    "olm_data/dataset/manifest.py": ({"msgspec.json.decode": 1}, _PART),
    "olm_data/dataset/options.py": ({"decode_typed": 3}, _PART),
    "olm_data/dataset/plan.py": ({"msgspec.json.decode": 1}, "what was encoded right before"),
    "olm_data/dataset/record.py": (
        {"decode_typed": 1, "np.memmap": 1},
        "maps the handle that Store.open checked; " + _PART,
    ),
    "olm_data/dataset/shard_writer.py": ({"np.memmap": 1, "open": 3, "pq.read_table": 1}, _OWN),
    "olm_data/extensions/doctor/doctor.py": ({"read_bytes": 1}, _OWN),
    "olm_data/mixture/like.py": ({"np.load": 1, "np.memmap": 3}, _OWN),
    "olm_data/extensions/show/token_text.py": (
        {"json.loads": 1},
        "a tokenizer that was parsed before",
    ),
    "olm_data/regular_files.py": ({"os.open": 1}, "the one place where files are opened"),
    "olm_train/extensions/ledger/loss_ledger.py": (
        {"read_bytes": 3},
        "files that this process wrote, or that ledger_files found in the run's own folder",
    ),
    "olm_train/callbacks/metrics_logger.py": (
        {"read_bytes": 1},
        "ends.jsonl, which append_end has just read within bounds and written",
    ),
    "olm_data/run_log/log.py": (
        {"decoder": 1},
        "lines within bounds, each name once by its colons; the others go to decode_line",
    ),
    "olm_data/threads.py": ({"read_text": 4}, "/proc and /sys: files of the kernel"),
    "olm_data/sources/files.py": ({"open": 1}, "inputs: bounded by sources/limits.py, row 24"),
    "olm_data/sources/json_records.py": (
        {"decoder": 2, "json.loads": 3},
        "lines of inputs: bounded by sources/limits.py; recursion is caught there, row 23",
    ),
    "olm_data/extensions/chat/conversations.py": (
        {"json.loads": 2},
        "texts of documents, bounded as all are; values in rows of inputs: those are in memory",
    ),
    "olm_data/extensions/chat/reader.py": (
        {"json.loads": 1},
        "lines of inputs: bounded by sources/limits.py; recursion is caught there, row 23",
    ),
    "olm_data/extensions/chat/template.py": (
        {"read_text": 1},
        "a template of this package, by its name",
    ),
    "olm_data/sources/parquet.py": ({"pq.ParquetFile": 1}, "inputs: bounded by limits, row 24"),
    "olm_data/sources/pylib.py": ({"read_bytes": 1}, "sources of the installed interpreter"),
    "olm_data/extensions/gcs/service.py": (
        {"open": 1},
        "uploads what was staged: " + _OWN,
    ),
    "olm_data/storage/service.py": ({"read_bytes": 1}, "sends what was staged: " + _OWN),
    "olm_data/storage/disk.py": ({"os.open": 2}, _LOCKS),
    "olm_data/storage/hub.py": ({"read_bytes": 1}, "the hub client's own cache"),
    "olm_data/storage/lease.py": (
        {"decode_typed": 1, "os.open": 2},
        "a flat struct of bounded bytes; a lease is opened to be written or locked",
    ),
    "olm_data/storage/process.py": ({"read_text": 2}, "/proc: files of the kernel"),
    "olm_data/storage/upload.py": ({"os.open": 1}, "uploads what was staged: " + _OWN),
    "olm_data/sinks.py": ({"os.open": 2, "open": 1}, "/dev/null for closed standard streams"),
    "olm_data/tokenization/duplicates.py": ({"open": 1, "np.fromfile": 1}, _OWN),
    "olm_data/tokenizer/tokenizer.py": (
        {"read_bytes": 2},
        "the user's; probed in a child",
    ),
    "olm_data/tokenizer/definition.py": (
        {"msgspec.json.decode": 1},
        "probed in a limited child",
    ),
    "olm_data/tokenizer/probe_child.py": ({"json.loads": 1}, "the child with limits itself"),
    "olm_data/chat_template_child.py": (
        {"json.loads": 1},
        "the child with limits itself",
    ),
    "olm_data/user_cache.py": ({"os.open": 1}, _LOCKS),
    "olm_data/encoders/code_points.py": ({"decode_typed": 1}, "a typed file of the user's cache"),
    "olm_train/callbacks/environment.py": (
        {"read_text": 2},
        "/proc: the driver's version; metadata of the packages of this Python",
    ),
    "olm_data/chat_template.py": (
        {"json.loads": 1},
        "a line of the child with limits",
    ),
    "olm_train/extensions/hf_export/beside.py": (
        {"read_bytes": 1},
        "the log that its own child wrote",
    ),
    "olm_train/extensions/hf_export/job.py": (
        {"read_bytes": 3},
        "Checkpoint.read_bytes is bounded",
    ),
    "olm_train/extensions/hf_export/tokenizer_files.py": (
        {"read_bytes": 1},
        "reads back what was just written: " + _OWN,
    ),
    "olm_train/model/load.py": ({"read_bytes": 1}, "Exported.read_bytes is bounded"),
    "olm_train/model/weights_folder.py": ({"open": 1}, "fsyncs a staged file: " + _OWN),
    "olm_train/checkpoint/tensors.py": ({"decode_typed": 1}, "bounded by its own reader"),
    "olm_train/checkpoint/load.py": ({"read_bytes": 2}, "Checkpoint.read_bytes is bounded"),
    "olm_train/extensions/averaging/merge.py": (
        {"read_bytes": 2},
        "Checkpoint.read_bytes is bounded",
    ),
    "olm_train/checkpoint/documents.py": (
        {"read_bytes": 1},
        "the run's own log in its work folder",
    ),
    "olm_train/checkpoint/portable.py": ({"read_bytes": 4}, "Checkpoint.read_bytes is bounded"),
    "olm_train/checkpoint/save.py": ({"read_bytes": 1}, "the run's own log in its work folder"),
    "olm_train/distributed/threads.py": ({"read_text": 1}, "/proc and /sys: files of the kernel"),
    "olm_train/run/command.py": (
        {"json.loads": 1, "read_bytes": 1},
        "the schema that is part of this package",
    ),
    "olm_train/trainer.py": ({"json.loads": 1}, "what json.dumps has just made"),
}
"""File -> the calls in it, and why they need no bound of their own."""

UNPACKERS = {
    "gzip", "bz2", "lzma", "tarfile", "decompress", "decompressobj", "ZstdDecompressor",
    "CompressedInputStream", "input_stream", "ParquetFile", "ParquetDataset", "read_table",
    "read_feather", "open_file", "open_stream", "ZipFile", "unpack_archive",
}  # fmt: skip

UNPACKS = {
    "olm_data/decompress.py": {"bz2", "lzma", "decompressobj", "CompressedInputStream"},
    "olm_data/parquet.py": {"ParquetFile"},
    "olm_data/sources/parquet.py": {"ParquetFile"},  # inputs: `_rows_at_once` checks each column
    "olm_data/extensions/tables/arrow.py": {
        "open_file",
        "open_stream",
    },  # inputs: `limits.Expansion`
    "olm_data/dataset/shard_writer.py": {"read_table"},  # what this process has just staged
    "olm_data/extensions/eval_sets/tasks.py": {
        "ZipFile"
    },  # the wheel, whose requests go to `decompress`
    "olm_data/extensions/exporting/token_files.py": {"gzip"},  # writes
    "olm_train/extensions/tracking/comet.py": {"ZipFile"},  # writes
}
"""Every module that unpacks something, and by what: a new one goes through the first two."""


def calls(path: Path) -> Counter[str]:
    """Return the reading calls of a module by name; opening to write is none."""
    found: Counter[str] = Counter()
    for node in ast.walk(tree(path)):
        if not isinstance(node, ast.Call):
            continue
        whole = ast.unparse(node.func)
        name = whole if whole in READS else whole.rpartition(".")[2]
        if name not in READS or (name == "open" and whole != "open"):
            continue
        mode = [a.value for a in node.args[1:2] if isinstance(a, ast.Constant)]
        if name == "open" and mode and set(str(mode[0])) & set("wax"):
            continue
        found[name] += 1
    return found


def test_s5_every_reading_call_is_bounded_or_listed_with_a_reason(repository: Path) -> None:
    found = {
        str(path.relative_to(repository)): dict(counts)
        for path in modules()
        if (counts := calls(path))
    }
    assert found == {name: item for name, item in found.items() if name in REASONS}, "say why"
    assert found.keys() == REASONS.keys(), "a reason for a call that is gone"
    for name, (wanted, reason) in REASONS.items():
        assert found[name] == wanted, name
        assert len(reason) > 20


def test_s5_the_walk_sees_each_kind_of_read(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        "open(p)\nopen(p, 'rb')\nopen(p, 'wb')\nPath(p).read_bytes()\nnp.load(p)\nstore.open(p)\n"
        "json.loads(b)\npq.ParquetFile(p)\nos.open(p, 0)\n"
    )
    assert calls(tmp_path / "m.py") == {
        "open": 2,
        "read_bytes": 1,
        "np.load": 1,
        "json.loads": 1,
        "pq.ParquetFile": 1,
        "os.open": 1,
    }


def unpackers(path: Path) -> set[str]:
    """Return what a module unpacks by: modules it imports, and calls of arrow, zlib and zipfile."""
    found: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            own = (node.module or "").startswith("olm_")
            found |= set() if own else {node.module or "", *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in (
            *("pa", "pyarrow", "pq", "pa.ipc", "pyarrow.parquet", "feather", "zlib"),
            *("zstandard", "zipfile", "shutil"),
        ):
            found.add(node.attr)
    return found & UNPACKERS


def test_s3_nothing_is_unpacked_but_through_the_doors_with_a_limit(
    repository: Path, tmp_path: Path
) -> None:
    found = {str(p.relative_to(repository)): names for p in modules() if (names := unpackers(p))}
    assert found == UNPACKS
    (tmp_path / "m.py").write_text(
        "import gzip\nfrom zipfile import ZipFile\npq.ParquetFile(p)\nzlib.decompress(b)\n"
    )
    assert unpackers(tmp_path / "m.py") == {"gzip", "ZipFile", "ParquetFile", "decompress"}
