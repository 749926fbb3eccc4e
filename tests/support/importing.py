"""Token files that other projects' writers wrote (`foreign/`), imported in this process."""

from __future__ import annotations

import json
from pathlib import Path

from olm_data.dataset.dataset import Dataset
from olm_data.extensions.importing.import_files import Imported, import_files
from olm_data.tokenizer.tokenizer import load_tokenizer

FOREIGN = Path(__file__).with_name("foreign")
TEXTS: list[str] = json.loads((FOREIGN / "documents.json").read_text())
EOS = 256
TOKENIZER = FOREIGN / "tokenizer.json"
SETS = {
    "dolma/part-0-00000.npy": "uint16",
    "datatrove/text_00000_unshuffled.ds": None,
    "megatron/int32.bin": None,
    "megatron/uint16.bin": None,
}
"""A file of each project -> its dtype, where no file says it."""
OLMO = b"""\
sources:
  - source_name: reddit:high
    target_ratio: 0.18273684787
    max_repetition_ratio: 2.5
    max_source_fraction: 0.5
    paths:
      - weka://bucket/reddit/**/*.npy  # globs stay as they are
      - s3://bucket/more/*.npy
  - source_name: web
    target_ratio: .81726315213
    paths: [/data/web/part-0.npy]
"""
"""A mixture of OLMo-core: its list of sources."""


def make(inputs: Path | list[Path], output: Path, eos: str = "auto", **options: object) -> Imported:
    """Import files with their own tokenizer."""
    named = [str(path) for path in (inputs if isinstance(inputs, list) else [inputs])]
    return import_files(named, str(output), load_tokenizer(TOKENIZER, eos=eos), **options)


def decoded(dataset: Dataset) -> list[str]:
    """Return the texts of a dataset, each of which ends in EOS."""
    spec = load_tokenizer(TOKENIZER)
    documents = [dataset.document(n).tokens for n in range(dataset.documents)]
    assert all(tokens[-1] == EOS for tokens in documents)
    return [spec.decode(tokens[:-1]) for tokens in documents]
