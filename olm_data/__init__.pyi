"""What the package offers, for type checkers: `__init__.py` imports it on first use."""

from olm_data.dataset.dataset import Dataset as Dataset
from olm_data.mixture.lock import Lock as Lock
from olm_data.order.schedule import Schedule as Schedule
from olm_data.rows.reader import RowReader as RowReader
from olm_data.verbs import mix as mix
from olm_data.verbs import tokenize as tokenize

__version__: str

__all__ = [
    "Dataset",
    "Lock",
    "RowReader",
    "Schedule",
    "__version__",
    "mix",
    "tokenize",
]
