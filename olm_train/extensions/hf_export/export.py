"""A checkpoint as a folder that transformers, vLLM, llama.cpp, MLX and their kin read.

    checkpoint, verified -> family of its shape, or refused: nothing is written
        rows of one tensor at a time -> dtype -> shard on the disk -> read back, sha256 compared
        tokenizer, configuration, model card -> read back; computed with, where transformers is
        -> the folder by its name, or config.json and receipt, which come last in a bucket

Main memory: the rows of one tensor in both dtypes, and what the system keeps of one file. A local
folder is there whole or not at all. In a bucket files are seen as they come: what tells a whole
export is `olm-export.json`, and no reader takes a folder without `config.json`.

Who reads a folder before it is there, and what could not be compared.

tokenizers, AutoTokenizer -> ids    transformers -> logits, text, loss (`verify.py`)    -> Verified
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors
import torch
from torch import Tensor

from olm_data.bounded_json import sha256_file
from olm_data.errors import InputError, OlmError, ValidationError, printable
from olm_data.mixture.lock import Lock, lock_of_run
from olm_data.model_receipt import FileProof, ModelClaim, ModelProof, ModelReceipt, Verified
from olm_data.rows.reader import RowReader
from olm_data.storage.destination import Draft, LocalFolder, RemotePrefix, destination, in_the_way
from olm_data.storage.disk import io_errors, write_durable
from olm_data.storage.output_paths import refuse_output
from olm_train.checkpoint.load import Checkpoint
from olm_train.checkpoint.merged import folder_of_paths
from olm_train.checkpoint.portable import evaluation_model, model_config
from olm_train.extensions.hf_export import verify
from olm_train.extensions.hf_export.job import DTYPES, ExportJob, ExportOptions
from olm_train.extensions.hf_export.shards import INDEX, index_of, refuse_other, write_shard
from olm_train.extensions.hf_export.tokenizer_files import TokenizerFiles, prove

ROWS = 2
"""Rows of the mixture whose loss is compared."""


def why_not_computed(job: ExportJob) -> str:
    """Return why transformers does not compute with the folder; empty: it does."""
    if job.options.check == "files":
        return "logits, greedy text and loss: --verify files"
    if job.options.check == "auto":
        if not verify.installed():
            return "logits, greedy text and loss: transformers is not installed"
        if not verify.knows(model_type := job.family.model_type):
            return f"logits, greedy text and loss: transformers has no class for a {model_type}"
        needed, here = 2 * 4 * job.config.num_params, verify.room_here()  # both models, fp32
        if needed > here:
            return (
                f"logits, greedy text and loss: both models take {needed / 1e9:,.0f} GB, more than "
                f"half of this machine's memory ({here / 1e9:,.0f} GB); --verify transformers"
            )
    return ""


def prove_folder(
    job: ExportJob, folder: Path, tokenizer: TokenizerFiles | None, why_not: str
) -> Verified:
    """Let other programs read a folder.

    Args:
        job: what it is to be.
        folder: local, with everything in it; without weights where transformers does not compute.
        tokenizer: what was written of it.
        why_not: nothing computes with it, see `why_not_computed`.

    Raises:
        ValidationError: one of them reads, or computes, something else.
    """
    skipped = [why_not] if why_not else []
    readers: list[str] = []
    if tokenizer is None:
        skipped.append("tokenizer: the checkpoint has none")
    else:
        readers = prove(folder, tokenizer)
        if len(readers) == 1:
            skipped.append("ids of AutoTokenizer: transformers is not installed")
    found: ModelProof | None = None
    if not why_not:
        model = job.fold.model(evaluation_model(job.checkpoint))
        for value in model.parameters():
            value.data = value.data.to(DTYPES[job.options.dtype]).float()
        try:
            batch = _rows(job)
        except (OlmError, OSError) as error:
            batch = []
            reason = error.what if isinstance(error, OlmError) else "its files are not there"
            skipped.append(f"loss of rows of the mixture: {reason}")
        found = verify.prove(folder, model, () if tokenizer is None else tokenizer.eos, batch)
    return Verified(
        tensors_read_by=f"safetensors {safetensors.__version__}",
        tokenizer_read_by=tuple(readers),
        model=found,
        not_compared=tuple(skipped),
    )


def _rows(job: ExportJob) -> Sequence[tuple[Tensor, Tensor, Tensor]]:
    """Return the first rows of the mixture, from the data it was trained on.

    Raises:
        OlmError, FileNotFoundError: they are not there any more.
    """
    if job.lock is None:
        raise InputError("nobody recorded a mixture")
    run = folder_of_paths(job.checkpoint)
    lock = Lock.read(lock_of_run(job.checkpoint.config, run))
    lock.refuse_far(run)
    if lock.digest != job.lock.digest:
        raise InputError("another mixture lies where that of the run was")
    reader = RowReader(lock)
    batch = reader.read(np.arange(min(ROWS, reader.total_rows)))
    fields = (batch.input_ids, batch.labels, batch.doc_start)
    return list(zip(*(torch.from_numpy(f.astype(np.int64)) for f in fields), strict=True))


MODEL_CONFIG = "config.json"


@dataclass(frozen=True)
class Result:
    """What an export came to: its receipt, and whether an earlier one had done it all."""

    receipt: ModelReceipt
    output: str
    already: bool


def export(
    checkpoint: Checkpoint,
    output: str,
    options: ExportOptions,
    *,
    trust: bool = False,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> Result:
    """Write a checkpoint as a folder for other programs.

    Args:
        checkpoint: of any number of ranks and any strategy; merged weights as well.
        output: local folder to make, or `s3://bucket/prefix`.
        options: dtype, files, what is proved.
        trust: import the class of the model, to say why it cannot be exported.
        watch: called with bytes of tensors written, and those there are to write.

    Raises:
        UsageError: no family can express the model; the message names the field.
        ConflictError: the output holds something else.
        ValidationError: what was written reads, or computes, otherwise than the checkpoint.
        ResourceError, StorageError: it cannot be written.
    """
    refuse_output(output)
    job = ExportJob(checkpoint, options, model_config(checkpoint, trust=trust))
    place = destination(output)
    if (done := there(place, job.claim)) is not None:
        return Result(done, output, already=True)
    if options.check == "transformers":
        verify.require(job.family.model_type)
    tokenizer = job.tokenizer  # refused before anything is written
    with place.draft(job.claim.encode()) as draft, io_errors(output, writing=True):
        receipt = _write(job, draft, tokenizer, remote=place.remote, watch=watch)
        draft.commit(receipt.encode())
    return Result(receipt, output, already=False)


def there(place: LocalFolder | RemotePrefix, claim: ModelClaim) -> ModelReceipt | None:
    """Return the receipt of the same export if it is there; None where the output is free.

    Raises:
        ConflictError: it holds something else, or files of that export have changed in size.
    """
    data = place.receipt()
    if data is None:
        return None
    try:
        receipt = ModelReceipt.decode(data, place.output)
    except ValidationError as error:
        raise in_the_way(place.output, f"{error.what}: {error.why}") from error
    if receipt.claim != claim:
        raise in_the_way(place.output, "another export is there already")
    changed = [name for name, file in receipt.files.items() if place.size(name) != file.bytes]
    if changed:
        raise in_the_way(place.output, f"the same export is there, without its {changed[0]}")
    return receipt


def _write(
    job: ExportJob,
    draft: Draft,
    tokenizer: TokenizerFiles | None,
    *,
    remote: bool,
    watch: Callable[[int, int], None],
) -> ModelReceipt:
    """Write, prove and settle all files; return the receipt."""
    files: dict[str, FileProof] = {}

    def settle(*names: str) -> None:
        for name in names:
            path = draft.folder / name
            files[name] = FileProof(path.stat().st_size, sha256_file(path))
        draft.settle()

    why_not = why_not_computed(job)
    documents = dict(tokenizer.files) if tokenizer is not None else {}
    model = (json.dumps(job.model_config, indent=2) + "\n").encode()
    tensors: dict[str, str] = {}
    values, total = job.values(), sum(each.bytes for each, _, _ in job.tensors)
    done = 0
    for shard in job.shards:
        written = write_shard(draft.folder, shard, values)
        refuse_other(draft.folder, shard, written)
        tensors |= written
        done += sum(each.bytes for each in shard.tensors)
        if why_not:
            settle(shard.file)  # in a bucket: uploaded, and gone from the disk here
        watch(done, total)
    index = index_of(job.shards, job.config.num_params)
    late = {INDEX: index} if index is not None else {}
    documents[CARD] = model_card(job)
    for name, data in {**documents, **late, MODEL_CONFIG: model}.items():
        write_durable(draft.folder / name, data)
    verified = prove_folder(job, draft.folder, tokenizer, why_not)
    (draft.folder / MODEL_CONFIG).unlink()  # it comes last: nothing is a model without it
    settle(*([shard.file for shard in job.shards] if not why_not else []), *documents, *late)
    write_durable(draft.folder / MODEL_CONFIG, model)
    settle(MODEL_CONFIG)
    lock = job.lock
    return ModelReceipt(
        claim=job.claim,
        model_class=job.family.architecture,
        parameters=job.config.num_params,
        step=job.checkpoint.step,
        lock=job.checkpoint.manifest.lock_digest,
        datasets={} if lock is None else {each.name: each.dataset for each in lock.sources},
        tokenizer=None if tokenizer is None else tokenizer.spec.sha256,
        probe=None if tokenizer is None else tokenizer.spec.probe_sha256,
        files=dict(sorted(files.items())),
        tensors=tensors,
        verified=verified,
    )


CARD = "README.md"


def model_card(job: ExportJob) -> bytes:
    """Return the bytes of the file."""
    lock, model_class, step = job.lock, job.family.architecture, job.checkpoint.step
    front = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    front += ["tags:", "- olm-data", *(["- conversational"] if job.template else []), "---"]
    rows = [
        ("class", f"`{model_class}`"),
        ("parameters", f"{job.config.num_params:,}"),
        ("weights", job.claim.dtype),
        ("optimiser steps", f"{step:,}"),
        ("checkpoint", f"`{job.claim.checkpoint}`"),
    ]
    lines = [*front, "", f"# {model_class}, step {step:,}", ""]
    lines += ["Exported by olm-data from a checkpoint whose every file was verified.", ""]
    if lock is not None:
        rows.append(("sequence length", f"{lock.sequence_length:,}"))
        rows.append(("mixture lock", f"`{lock.digest}`"))
    lines += ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows), ""]
    if lock is not None:
        lines += [
            "## Data",
            "",
            "| source | tokens | digest of the dataset |",
            "| --- | --- | --- |",
        ]
        lines += [
            f"| {_cell(source.name)} | {source.tokens:,} | `{source.dataset}` |"
            for source in lock.sources
        ]
        lines.append("")
    lines += ["## Use", ""]
    if job.tokenizer is not None:
        lines += [
            "```python",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            'folder = "."  # this one',
            "tokenizer = AutoTokenizer.from_pretrained(folder)",
            "model = AutoModelForCausalLM.from_pretrained(folder)",
            'ids = tokenizer("Once upon a time", return_tensors="pt")',
            "print(tokenizer.decode(model.generate(**ids, max_new_tokens=40)[0]))",
            "```",
        ]
    else:
        lines.append("There is no tokenizer with this model: none lay with the data.")
    lines += [
        "",
        "`olm-export.json` says what was proved of these files, and by which program.",
        "",
    ]
    return "\n".join(lines).encode()


def _cell(text: str) -> str:
    return printable(text).replace("|", "\\|")
