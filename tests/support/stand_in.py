"""Datasets that exist as a manifest only, of any size: for compiling mixtures without tokens."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st

from olm_data.config.values import Values
from olm_data.dataset.dataset import Dataset
from olm_data.dataset.manifest import InputInfo, Manifest, ShardDigests, ShardInfo, Totals
from olm_data.dataset.tokenizer import TokenizerInfo
from olm_data.mixture.lock import Lock
from olm_data.mixture.manifest import Mixture, mixture_of
from olm_data.mixture.mix import MixPlan
from olm_data.storage.store import Store

_SHA = "0" * 64

MANIFEST = """\
version: 1
seed: 20260101
sequence_length: 2048
packing: concat
sources:
  web:  {data: ./tokens/web, max_epochs: 4}
  code: {data: "s3://bucket/tokens/code", max_epochs: 2.5}
stages:
  - {name: main,   tokens: 95M, weights: {web: 85, code: 15}}
  - {name: anneal, tokens: 5M,  tokens_from: {web: 2M, code: 3M}}
on_exhausted: error
"""


def parse_mixture(
    text: str | bytes, path: str = "manifest.yaml", folder: str | os.PathLike[str] = "."
) -> Mixture:
    """Return the mixture of a manifest's text, whose paths count from `folder`."""
    return mixture_of(Values.parse(text, path, folder=folder, numbers="exact", digits_only=True))


def stand_in_dataset(
    name: str,
    tokens: int,
    *,
    documents: int = 0,
    vocab_size: int = 500,
    tokenizer: str = "one",
    dtype: str = "uint16",
    bos: int | None = None,
) -> Dataset:
    """Return an opened dataset of `tokens` tokens; its digest depends on the arguments only."""
    documents = documents or max(1, tokens // 100)
    sha256 = hashlib.sha256(tokenizer.encode()).hexdigest()
    manifest = Manifest(
        format="olm-dataset",
        version=1,
        container="npy",
        dtype=dtype,
        tokenizer=TokenizerInfo(
            sha256=sha256,
            probe_sha256=sha256,
            vocab_size=vocab_size,
            bos=bos,
            eos=0,
            special="plain",
        ),
        stored_options=msgspec.Raw(msgspec.json.encode({"name": name})),
        plan=_SHA,
        inputs=[InputInfo("input.jsonl", 1, "line", documents, _SHA)],
        shards=[ShardInfo("shard-00000", tokens, documents, tokens, 0, ShardDigests(*[""] * 4))],
        totals=Totals(tokens, documents, tokens, documents, 0),
        dropped={},
        max_documents_in={"64": 3, "2048": 40},
        stored_tools={},
    )
    # the golden lock names stand-ins whose shard has no digests
    none = b'"sha256":{"docs":"","ends":"","record":"","tokens":""}'
    body = manifest.spelled()[0].replace(none, b'"sha256":{}')
    manifest = msgspec.structs.replace(manifest, digest=hashlib.sha256(body).hexdigest())
    return Dataset(Store(f"/nowhere/{name}"), manifest)


def stand_ins(mixture: Mixture, tokens: int = 60_000_000, **options: Any) -> dict[str, Dataset]:
    """Return a dataset of `tokens` tokens for each source of a manifest."""
    return {s.name: stand_in_dataset(s.name, tokens, **options) for s in mixture.sources}


def compiled(text: str, tokens: int = 60_000_000) -> Lock:
    """Compile a manifest's text against sources of `tokens` tokens each."""
    mixture = parse_mixture(text)
    return MixPlan(mixture, stand_ins(mixture, tokens)).compile()


THREE_SOURCES = """\
version: 1
seed: 3
sequence_length: 10
sources: {a: {data: ./a, max_epochs: 9}, b: {data: ./b, max_epochs: 9}, c: {data: ./c}}
stages:
"""


def three_sources(stages: list[dict[str, object]], rows: dict[str, int] | None = None) -> Lock:
    """Compile a manifest of the sources a, b and c, of `rows` rows of 10 tokens."""
    lines = [f"  - {json.dumps({'name': f's{i}'} | stage)}\n" for i, stage in enumerate(stages)]
    mixture = parse_mixture(THREE_SOURCES + "".join(lines))
    sizes = {"a": 400, "b": 300, "c": 200} | (rows or {})
    opened = {name: stand_in_dataset(name, n * 10 + 1) for name, n in sizes.items()}
    return MixPlan(mixture, opened).compile()


def rows_of(lock: Lock) -> list[tuple[object, ...]]:
    """Return what every row of a run is, by brute force."""
    place = lock.schedule().locate(np.arange(lock.total_rows))
    datasets = [(source.name, source.dataset) for source in lock.sources]
    found = zip(place.source.tolist(), place.epoch.tolist(), place.row.tolist(), strict=True)
    return [(datasets[s], epoch, row) for s, epoch, row in found]


STAGE = st.builds(
    lambda tokens, weights: {"tokens": tokens, "weights": dict(zip("abc", weights, strict=True))},
    st.integers(1, 40).map(lambda n: n * 10),
    st.tuples(*[st.integers(0, 3)] * 3).filter(any),
)
