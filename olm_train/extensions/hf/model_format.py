"""Models of transformers as a format that runs begin with and commands open.

    load_path -> pinned -> fetched, one process of a machine a file -> shape, tokenizer compared
              -> load: each rank fills what is at home on it -> origin: address, digests of files

From the first checkpoint on the run needs none of these files. `load_model` opens also what
`model.save` or `olm-train export` wrote.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from olm_data.bounded_json import digest
from olm_data.dataset.tokenizer import TOKENIZER, prompt_tokenizer
from olm_data.errors import InputError, UsageError
from olm_data.mixture.lock import Lock
from olm_train.checkpoint.documents import RunOrigin, relative_path, tokenizer_of_data
from olm_train.checkpoint.model_format import Beginning, ModelFormat
from olm_train.checkpoint.policy import LoadPolicy
from olm_train.extensions.hf.family import FREE, canonical
from olm_train.extensions.hf.fields import ours_of
from olm_train.extensions.hf.load import Opened, check_tokenizer, fill, open_model
from olm_train.extensions.hf.source import (
    SCHEME,
    fetch,
    file_digests,
    is_transformers,
    pinned,
    read_tokenizer,
)
from olm_train.model.config import DecoderConfig
from olm_train.model.decoder import Decoder
from olm_train.model.load import load_saved
from olm_train.model.upcycle import refuse_unequal
from olm_train.train_module_base import TrainModule

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def from_transformers(
    policy: LoadPolicy,
    module: TrainModule,
    lock: Lock | None,
    save_folder: str,
    say: Callable[[str], None],
) -> Beginning:
    """Check the model of transformers at `load_path`; every rank calls it.

    Args:
        module: to train.
        lock: of the data; None: there is none, and the tokenizer cannot be compared.
        save_folder: of the run.
        say: prints a line, on rank 0.

    Raises:
        UsageError: state of a trainer or an optimiser is asked for; or the vocabulary is too small.
        InputError: our decoder cannot be that model, or a file is missing.
        ValidationError: shape or tokenizer are those of another model.
        StorageError: the hub or store cannot be reached.
    """
    policy.require_weights_alone("a model of transformers comes")
    world, given = module.world, policy.path or ""
    place = world.on_main(lambda: pinned(given))
    world.on_each(lambda: fetch(place))
    found: list[Opened] = []
    world.on_each(lambda: found.append(open_model(place)))
    opened = found[0]
    config = _same_shape(opened, module, lock, policy)
    if lock is None:
        say("warning: the data has no lock, so its tokenizer cannot be compared with the model's")
    else:
        rules = lock.tokenizer
        compared = world.on_main(lambda: check_tokenizer(opened, rules, known_tokenizer(lock)))
        say(f"{place}: {compared}")
    digests = world.on_each(lambda: file_digests(place, world.rank, world.size))
    files = dict(sorted(pair for each in digests for pair in each.items()))
    path = relative_path(place, save_folder)

    def load() -> None:
        if policy.upcycle:
            module.ensure_weights()  # of the routers
        state = module.state_dict()["model"]
        results = world.on_each(lambda: fill(opened, state, config))
        module.load_state_dict({"model": state})
        said, most = results[world.rank][0], max(read for _, read in results)
        say(f"loaded {'; '.join(said)}; a rank read {most / 1e6:,.1f} MB at most")

    return Beginning(
        place=place,
        load=load,
        origin=RunOrigin(path=path, step=0, digest=digest(files), files=files),
    )


def known_tokenizer(lock: Lock) -> bytes | None:
    """Return the `tokenizer.json` that lies with the data of a lock, None where none does."""
    try:
        return tokenizer_of_data(lock)
    except InputError:
        return None


def _same_shape(
    opened: Opened, module: TrainModule, lock: Lock | None, policy: LoadPolicy
) -> DecoderConfig:
    """Return the shape of the model to train, which must be that of the weights.

    Raises:
        UsageError: it is another one; names the fields.
    """
    config = module.model_config
    if type(config) is not DecoderConfig:
        raise UsageError(
            "only a Decoder can begin with a model of transformers",
            where="trainer.load_path",
            fix="load the weights into your model yourself, before the training",
        )
    theirs = opened.config
    ids = 0 if lock is None else lock.tokenizer.vocab_size
    size = opened.vocabulary_size(ids, policy.vocabulary)
    ours = ours_of(canonical(config))
    if policy.upcycle:
        refuse_unequal(replace(theirs, vocab_size=size), canonical(config))
        theirs = replace(theirs, feed_forward=canonical(config).feed_forward)
    wanted = {**dict.fromkeys(ours), **ours_of(theirs), "vocab_size": size}
    wrong = [
        f"model.{name} is {ours.get(name)}, not {value}"
        for name, value in wanted.items()
        if name not in FREE and ours.get(name) != value
    ]
    if wrong:
        raise UsageError(
            f"the model to train is not that of the weights: {'; '.join(wrong)}",
            where=opened.place,
            fix="leave these fields out: they follow from its config.json",
        )
    return config


def is_address(place: str) -> bool:
    """Whether a place is a repository of the hub."""
    return place.startswith(SCHEME)


TRANSFORMERS = ModelFormat(
    free=FREE,
    claims=is_transformers,
    pinned=pinned,
    may_change=is_address,
    open=open_model,
    canonical=canonical,
    begin=from_transformers,
)
"""`hf://ORG/NAME[@REVISION]`, or a folder, local or remote."""


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
