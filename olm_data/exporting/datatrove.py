"""`--to datatrove`: a tokenized file of datatrove a shard.

    shard-00000.ds             ids and nothing else, uint16 or uint32
    shard-00000.ds.index       uint64 ends of the documents, cumulative, in tokens
    shard-00000.ds.metadata    three lines: tokenizer|bytes a token, tokens, tokens for people

Layout from datatrove/pipeline/tokens/tokenizer.py (TokenizedFile).
"""

from __future__ import annotations

from pathlib import Path

from olm_data.dataset.dataset import Dataset
from olm_data.dataset.shard import Shard
from olm_data.errors import printable
from olm_data.exporting.base import PIECE, ByShard, Counts, lost_columns, place_tokens


class Datatrove(ByShard):
    """Writes `.ds`, `.ds.index` and `.ds.metadata`. See `base.Writer`."""

    def __init__(self, dataset: Dataset, folder: Path) -> None:
        self.dataset, self.folder, self.counts = dataset, folder, Counts()

    def add(self, index: int, shard: Shard) -> None:
        """Write the three files of a shard."""
        path = self.folder / f"{self.dataset.manifest.shards[index].name}.ds"
        tokens, linked = place_tokens(self.dataset, shard, path)
        with open(f"{path}.index", "wb") as file:
            for low in range(0, len(shard.ends), PIECE):
                file.write(shard.ends[low : low + PIECE].astype("<u8").data)
        name = printable(self.dataset.tokenizer_name).replace("|", "_")
        size = self.dataset.dtype.itemsize
        Path(f"{path}.metadata").write_text(f"{name}|{size}\n{tokens}\n{for_people(tokens)}")
        self.counts.tokens += tokens
        self.counts.linked += linked
        self.counts.documents += len(shard.ends)

    @staticmethod
    def lost(dataset: Dataset) -> list[str]:
        """Say what cannot be held, and what datatrove's reader leaves out."""
        said = lost_columns(dataset, ids=True, origins=True)
        said.append("datatrove's dataset leaves out the last partial window of each file")
        return said


def for_people(tokens: int) -> str:
    """Return a token count with three digits and a metric prefix: `1.23 MT`."""
    exponent = len(str(tokens)) - 1
    number = tokens / 10 ** (exponent // 3 * 3)
    return f"{number:.{2 - exponent % 3}f} {['', 'k', 'M', 'G', 'T', 'P'][exponent // 3]}T"
