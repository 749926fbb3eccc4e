"""`olm-data mix --compare-packing`: what each packing would cost a mixture, or a dataset.

manifest | dataset -> datasets, views, keys of the packing -> packing.compare -> Comparison, ...
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import asdict

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.target import dataset_root
from olm_data.mixture.manifest import read_mixture
from olm_data.mixture.mix import MANIFESTS
from olm_data.mixture.sources import open_sources, open_views
from olm_data.packing.compare import Comparison, compare
from olm_data.packing.packings import PACKINGS

SEQUENCE_LENGTH = 2048
"""Of a dataset by itself."""


def compare_packing(
    target: str, lengths: Sequence[int] = (), *, most_documents: int | None
) -> list[Comparison]:
    """Pack a dataset, or each source of a mixture as its manifest asks for it, in every way.

    Args:
        target: a manifest, or the folder or URL of a dataset.
        lengths: sequence lengths; by default the manifest's, 2,048 for a dataset.
        most_documents: look at so many documents of each dataset, its first; None for all.

    Raises:
        UsageError: the manifest is refused.
        InputError, ValidationError: there is no sound dataset, or nothing of it is left.
    """
    datasets, views, keys = {}, {}, {}
    if target.endswith(MANIFESTS):
        mixture = read_mixture(target)
        datasets, views, keys = open_sources(mixture), open_views(mixture), asdict(mixture.packing)
        lengths = lengths or (mixture.sequence_length,)
    else:
        datasets = {target: Dataset.open(dataset_root(target))}
    packings = [
        kind(**{key: value for key, value in keys.items() if key in kind.__struct_fields__})
        for kind in PACKINGS.values()
    ]
    return [
        compare(dataset, name, packing, length, most_documents=most_documents, view=views.get(name))
        for name, dataset in datasets.items()
        for length in lengths or (SEQUENCE_LENGTH,)
        for packing in packings
    ]
