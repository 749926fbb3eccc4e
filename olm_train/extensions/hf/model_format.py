"""Models of transformers as a format that runs begin with and commands open."""

from __future__ import annotations

from collections.abc import Callable

from olm_data.mixture.lock import Lock
from olm_train.checkpoint.model_format import Beginning, ForeignModel, ModelFormat
from olm_train.checkpoint.policy import LoadPolicy
from olm_train.extensions.hf.beginning import from_transformers
from olm_train.extensions.hf.family import FREE, canonical
from olm_train.extensions.hf.load import open_model
from olm_train.extensions.hf.source import SCHEME, is_transformers, pinned
from olm_train.model.config import DecoderConfig
from olm_train.train_module_base import TrainModule


class Transformers(ModelFormat):
    """`hf://ORG/NAME[@REVISION]`, or a folder, local or remote."""

    free = FREE

    def claims(self, place: str) -> bool:
        return is_transformers(place)

    def pinned(self, place: str) -> str:
        return pinned(place)

    def may_change(self, place: str) -> bool:
        return place.startswith(SCHEME)

    def open(self, place: str) -> ForeignModel:
        return open_model(place)

    def canonical(self, config: DecoderConfig) -> DecoderConfig:
        return canonical(config)

    def begin(
        self,
        policy: LoadPolicy,
        module: TrainModule,
        lock: Lock | None,
        save_folder: str,
        say: Callable[[str], None],
    ) -> Beginning:
        return from_transformers(policy, module, lock, save_folder, say)
