"""The kinds of content that are pushed and pulled, by `Repository.kind`."""

from __future__ import annotations

from collections.abc import Mapping

from olm_data.extensions.hub.content import Kind
from olm_data.extensions.hub.datasets import Datasets
from olm_data.extensions.hub.models import Models

KINDS: Mapping[str, Kind] = {kind.name: kind for kind in (Datasets(), Models())}
