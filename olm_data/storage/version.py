"""One version of an object in a bucket: what is read of it in parts is never of two.

name -> size, ETag -> read(start, stop) of that version | refused where another took its place
"""

from __future__ import annotations

from olm_data.errors import ValidationError
from olm_data.storage.objects import RemoteFailure
from olm_data.storage.store import Store


class OneVersion:
    """An object as it is now.

    Args:
        store: remote.
        name: of the object.

    Attributes:
        url: of it.
        size: in bytes.

    Raises:
        FileNotFoundError: there is none.
        RemoteFailure: the store refused, or failed too often.
    """

    def __init__(self, store: Store, name: str) -> None:
        self.url = store.url(name)
        self._bucket, self._key = store.bucket, store.key(name)
        found = self._bucket.head(self._key)
        if found is None:
            raise FileNotFoundError(self.url)
        self.size, self._etag = found.size, found.etag

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop); from any thread.

        Raises:
            ValidationError: another version is there now, or none.
            RemoteFailure: as for making one.
        """
        try:
            data = self._bucket.get(self._key, start, stop, etag=self._etag or None)
        except FileNotFoundError:
            data = b""
        except RemoteFailure as failure:
            if not failure.is_other_version:
                raise
            data = b""
        if len(data) != stop - start:
            raise ValidationError(
                "the file was replaced or removed while it was read",
                where=self.url,
                fix="run the same command again when nobody writes there",
            )
        return data
