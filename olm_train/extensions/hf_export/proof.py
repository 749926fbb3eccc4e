"""Who reads a folder before it is there, and what could not be compared.

tokenizers, AutoTokenizer -> ids    transformers -> logits, text, loss (`verify.py`)    -> Verified
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import safetensors
import torch
from torch import Tensor

from olm_data.errors import InputError, OlmError
from olm_data.mixture.lock import Lock, lock_of_run
from olm_data.model_receipt import ModelProof, Verified
from olm_data.rows.reader import RowReader
from olm_train.checkpoint.merged import folder_of_paths
from olm_train.checkpoint.weights import evaluation_model
from olm_train.extensions.hf_export import verify
from olm_train.extensions.hf_export.job import DTYPES, Job
from olm_train.extensions.hf_export.tokenizer_files import TokenizerFiles, prove

ROWS = 2
"""Rows of the mixture whose loss is compared."""


def why_not_computed(job: Job) -> str:
    """Return why transformers does not compute with the folder; empty: it does."""
    if job.options.check == "files":
        return "logits, greedy text and loss: --verify files"
    if job.options.check == "auto":
        if not verify.installed():
            return "logits, greedy text and loss: transformers is not installed"
        needed, here = verify.room_needed(job.config.num_params), verify.room_here()
        if needed > here:
            return (
                f"logits, greedy text and loss: both models take {needed / 1e9:,.0f} GB, more than "
                f"half of this machine's memory ({here / 1e9:,.0f} GB); --verify transformers"
            )
    return ""


def prove_folder(
    job: Job, folder: Path, tokenizer: TokenizerFiles | None, why_not: str
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
        model = evaluation_model(job.checkpoint)
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


def _rows(job: Job) -> Sequence[tuple[Tensor, Tensor, Tensor]]:
    """Return the first rows of the mixture, from the data it was trained on.

    Raises:
        OlmError, FileNotFoundError: they are not there any more.
    """
    if job.lock is None:
        raise InputError("nobody recorded a mixture")
    run = folder_of_paths(job.checkpoint)
    lock = Lock.read(lock_of_run(job.checkpoint.config(), run))
    lock.refuse_far(run)
    if lock.digest != job.lock.digest:
        raise InputError("another mixture lies where that of the run was")
    reader = RowReader(lock)
    batch = reader.read(np.arange(min(ROWS, reader.total_rows)))
    fields = (batch.input_ids, batch.labels, batch.doc_start)
    return list(zip(*(torch.from_numpy(f.astype(np.int64)) for f in fields), strict=True))
