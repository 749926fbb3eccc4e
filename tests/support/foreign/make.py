"""Writes the files beside it with the other projects' own writers; run once, results are kept.

    PYTHON_OF_DOLMA make.py dolma | PYTHON_OF_DATATROVE make.py datatrove | PYTHON_OF_MEGATRON ...

dolma 1.2.1, datatrove 0.10.1 and megatron-core 0.16.1 wrote what is there; ai2-olmo-core 3.0.0 read
two of the files. `documents.json` holds
the text, `tokenizer.json` is a byte-level tokenizer of 257 entries, the last one EOS.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
EOS = 256
TEXTS = [
    "one",
    'two, with "quotes", commas',
    "three\nlines\nhere",
    "caf\u00e9 \u4f60\u597d",
    "x" * 700,
    *(f"document {n} " * (n % 5 + 1) for n in range(5, 40)),
]


def make_tokenizer() -> None:
    """Write the texts and a tokenizer whose ids are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(HERE / "tokenizer.json"))
    (HERE / "documents.json").write_text(json.dumps(TEXTS, indent=0))


def make_dolma() -> None:
    """Write with `dolma tokens`; an odd id and a source with a comma test the quoting."""
    out = HERE / "dolma"
    source = HERE / "a,b.jsonl.gz"
    with gzip.open(source, "wt") as file:
        for n, text in enumerate(TEXTS):
            file.write(json.dumps({"id": f'id "{n}", x', "text": text, "source": "s"}) + "\n")
    subprocess.run(
        [
            *(str(Path(sys.executable).parent / "dolma"), "tokens", "--documents", source.name),
            *("--destination", str(out), "--processes", "1"),
            *("--tokenizer.name_or_path", "tokenizer.json"),
            *("--tokenizer.eos_token_id", str(EOS), "--tokenizer.pad_token_id", str(EOS)),
            *("--dtype", "uint16"),
        ],
        cwd=HERE,
        check=True,
    )
    source.unlink()


def make_datatrove() -> None:
    """Write with datatrove's DocumentTokenizer."""
    from datatrove.data import Document
    from datatrove.pipeline.tokens import DocumentTokenizer

    os.chdir(HERE)

    step = DocumentTokenizer(
        output_folder="datatrove",
        tokenizer_name_or_path="tokenizer.json",  # as it is, it stands in the metadata
        eos_token="<|endoftext|>",
        save_filename="text",
        shuffle_documents=False,
        save_loss_metadata=True,
    )
    step.run((Document(text=t, id=str(n)) for n, t in enumerate(TEXTS)), rank=0, world_size=1)


def make_megatron() -> None:
    """Write with Megatron's builder: int32 with a document of two sequences, and uint16."""
    import numpy
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(HERE / "tokenizer.json"))
    (HERE / "megatron").mkdir(exist_ok=True)
    for name in ("int32", "uint16"):
        prefix = str(HERE / "megatron" / name)
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.dtype(name).type)
        for number, text in enumerate(TEXTS):
            ids = [*tokenizer.encode(text).ids, EOS]
            cut = len(ids) // 2 if number == 3 and name == "int32" else len(ids)
            builder.add_document(ids, [n for n in (cut, len(ids) - cut) if n])
        builder.finalize(f"{prefix}.idx")


def make_olmo_core() -> None:
    """Read two raw files with OLMo-core's loader: the batches of three epochs, as instances."""
    import numpy
    from olmo_core.data import DataCollator, NumpyFSLDataset
    from olmo_core.data.data_loader import NumpyFSLDataLoader
    from olmo_core.data.utils import get_labels

    files = [HERE / "dolma/part-0-00000.npy", HERE / "datatrove/text_00000_unshuffled.ds"]
    cases = []
    for seed, length, batch, target in ((3, 32, 8, None), (20260101, 16, 10, 64)):
        dataset = NumpyFSLDataset(
            *files,
            sequence_length=length,
            pad_token_id=EOS,
            eos_token_id=EOS,
            vocab_size=EOS + 1,
            dtype=numpy.uint16,
            max_target_sequence_length=target,
        )
        chunk = 1 if target is None else target // length
        loader = NumpyFSLDataLoader(
            dataset,
            chunk_size=chunk,
            collator=DataCollator(pad_token_id=EOS),
            global_batch_size=batch * length,
            work_dir="/tmp",
            seed=seed,
        )
        batches = []
        for epoch in (1, 2, 3):
            loader.reshuffle(epoch=epoch, in_memory=True)
            for item in loader:
                ids, labels = item["input_ids"], get_labels(item)
                batches.append([item["index"].tolist(), ids.tolist(), labels.tolist()])
            loader.reset()
        names = ("seed", "sequence_length", "batch_rows", "chunk_rows", "instances", "batches")
        values = (seed, length, batch, chunk, len(dataset), batches)
        cases.append(dict(zip(names, values, strict=True)))
    with gzip.GzipFile(HERE / "olmo-core.json.gz", "wb", mtime=0) as file:
        file.write(json.dumps(cases).encode())


if __name__ == "__main__":
    {
        "tokenizer": make_tokenizer,
        "dolma": make_dolma,
        "datatrove": make_datatrove,
        "megatron": make_megatron,
        "olmo-core": make_olmo_core,
    }[sys.argv[1]]()
