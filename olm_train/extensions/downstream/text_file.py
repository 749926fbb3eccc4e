"""A file of text to measure a model on: tokenised with the model's own tokenizer.

file, local or remote -> olm_data.tokenize, with the BOS and EOS of the model -> data set
"""

from __future__ import annotations

from pathlib import Path

import olm_data
from olm_data.errors import InputError
from olm_data.kinds import is_text_name
from olm_train.checkpoint.manifest import TOKENIZER
from olm_train.checkpoint.portable import TrainedModel


def is_text_file(place: str) -> bool:
    """Whether a place is a file of text; a remote one is known by its name."""
    return Path(place).is_file() or ("://" in place and is_text_name(place))


def tokenized(found: TrainedModel, file: str, scratch: Path) -> str:
    """Tokenise a file of text with the model's tokenizer; return the folder of the data set.

    Args:
        scratch: folder to make, for all that is written.

    Raises:
        OlmError: it cannot be read, or holds no document.
    """
    data = found.tokenizer_json()
    tokenizer = found.tokenizer()  # checked against the lock
    assert data is not None
    scratch.mkdir()
    (scratch / TOKENIZER).write_bytes(data)
    rules = found.rules(tokenizer)
    names = [
        None if token is None else tokenizer.id_to_token(token)
        for token in (rules.begins, rules.eos)
    ]
    output = str(scratch / "tokens")
    try:
        olm_data.tokenize(
            file,
            tokenizer=scratch / TOKENIZER,
            output=output,
            bos=names[0] or "none",
            eos=names[1] or "none",
            workers=1,
        )
    except InputError as error:  # its advice may be an option that this command has not
        if "--" not in (error.fix or ""):
            raise
        raise InputError(
            error.what,
            where=error.where,
            why=error.why,
            fix="give the folder of a dataset (olm-data tokenize has options for such files), or "
            "if they are questions of an eval set (olm-data eval-set build)",
        ) from error
    return output
