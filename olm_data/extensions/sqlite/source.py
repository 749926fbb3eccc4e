"""SQLite: `--source sqlite --root corpus.db --subset articles`, a table or a query.

The database is opened to be read only, and its rows come one after the other. The rows of a query
have to come in the same order each time: give it an ORDER BY.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from olm_data.errors import InputError, suggest
from olm_data.sources.files import local_revision
from olm_data.sources.own import OwnSource
from olm_data.sources.rows import Row

_QUERY = re.compile(r"\s*(select|with)\s", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Sqlite(OwnSource):
    """A table or query of a local database; its columns are those of the records.

    Attributes:
        root: the file.
        subset: name of a table, or a query that begins with SELECT or WITH; may be left out where
            there is one table.
    """

    root: str
    subset: str | None = None

    def parts(self) -> list[str]:
        """Return the table or query.

        Raises:
            InputError: there is no such file or table.
        """
        if not Path(self.root).is_file():
            raise InputError("there is no such file", where=self.root)
        with closing(self._open()) as database:
            query = "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') ORDER BY name"
            tables = [str(name) for (name,) in database.execute(query)]
        wanted = tables[0] if len(tables) == 1 and self.subset is None else self.subset
        if wanted is None or not (wanted in tables or _QUERY.match(wanted)):
            raise InputError(
                f"there is no table {wanted}" if wanted else "there are several tables",
                where=self.root,
                why=f"its tables are: {', '.join(tables)}",
                fix=f"--subset TABLE, or a query ({suggest(wanted or '', tables)})",
            )
        return [wanted]

    def rows(self, part: str) -> Iterator[Row]:
        """Yield the rows of a table, in the order of its key, or of a query."""
        with closing(self._open()) as database:
            cursor = database.execute(part if _QUERY.match(part) else self._whole(database, part))
            names = [column[0] for column in cursor.description]
            for row in cursor:
                yield dict(zip(names, row, strict=True))

    def size(self, part: str) -> int:
        """Return the bytes of the file."""
        return Path(self.root).stat().st_size

    def revision(self, part: str) -> str:
        """Return what changes with the file, or with the journal beside it."""
        files = [self.root, f"{self.root}-wal"]
        return " ".join(local_revision(name) for name in files if Path(name).exists())

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(f"{Path(self.root).resolve().as_uri()}?mode=ro", uri=True)

    def _whole(self, database: sqlite3.Connection, table: str) -> str:
        name = '"' + table.replace('"', '""') + '"'
        try:
            database.execute(f"SELECT rowid FROM {name} LIMIT 1")
        except sqlite3.OperationalError:  # a view, or a table that is in the order of its key
            return f"SELECT * FROM {name}"
        return f"SELECT * FROM {name} ORDER BY rowid"
