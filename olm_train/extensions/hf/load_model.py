"""A decoder out of a folder or a repository, whoever wrote it.

our own format (`model.save`, `olm-train export`)  -> `model/load.py`
of transformers: folder, s3://..., hf://ORG/NAME   -> shape by its config.json -> filled
                                                   -> (model, tokenizer), or the model
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from olm_data.dataset.tokenizer import TOKENIZER, prompt_tokenizer
from olm_train.extensions.hf.load import open_model
from olm_train.extensions.hf.source import is_transformers, pinned, read_tokenizer
from olm_train.model.decoder import Decoder
from olm_train.model.load import load_saved

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def load_model(
    folder: str | os.PathLike[str], *, classes: Iterable[type] = (), trust: bool = False
) -> Decoder | tuple[Decoder, Tokenizer]:
    """Return a model, on the CPU, in eval mode.

    Weights have the values and dtypes they were saved with; those of a model of transformers that
    has several dtypes are float32.

    Args:
        folder: that `model.save` or `olm-train export` wrote, or its safetensors file; or a model
            of transformers; local or remote, or `hf://ORG/NAME[@REVISION]` of one.
        classes: of one's own that a model in our format and its configuration may be of.
        trust: import other classes by the path in such a folder: this runs the installed code of
            that name. Code that lies in a folder is never run.

    Returns:
        The model; with its tokenizer, where one lies beside it.

    Raises:
        InputError: there is no model, our decoder cannot be it, or it is of a class that is not
            allowed here.
        ValidationError: it is damaged, or shape and weights do not fit each other.
        UsageError: its class cannot be imported, or the address is none.
        StorageError: the hub or store cannot be reached.
    """
    place = os.fspath(folder)
    if not is_transformers(place):
        return load_saved(place, classes=classes, trust=trust)
    opened = open_model(pinned(place))
    model = opened.build()
    data = read_tokenizer(opened.place)
    if data is None:
        return model
    return model, prompt_tokenizer(data, None, f"{opened.place}/{TOKENIZER}")
