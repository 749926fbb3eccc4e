"""What to say while somebody waits for shards that `tokenize` is still to write.

folders of datasets --read_status, now and then--> a line: for what, how long, how far it is
                               nobody at work for GIVE_UP_SECONDS --> InputError: what to type
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from olm_data.counts import duration
from olm_data.errors import InputError, typed
from olm_data.tokenization.status import read_status

LINE_SECONDS = 10.0
"""How often a line is said."""
GIVE_UP_SECONDS = 600.0
"""How long tokenising may stand still: time to begin it again."""


class Waiting:
    """One wait for shards of some datasets, from the moment it is made.

    Args:
        places: folders or URLs of the datasets.
    """

    def __init__(self, places: Sequence[str]) -> None:
        self._places = places
        self._begun = self._at_work = time.monotonic()
        self._next = self._begun + LINE_SECONDS / 5

    def line(self) -> str | None:
        """Return what to say now, None for nothing.

        Raises:
            InputError: nobody has been at work for `GIVE_UP_SECONDS`.
        """
        now = time.monotonic()
        if now < self._next:
            return None
        self._next = now + LINE_SECONDS
        told = {place: _told(place) for place in self._places}
        stopped = {place: words for place, (at_work, words) in told.items() if not at_work}
        if not stopped:
            self._at_work = now
        elif now - self._at_work > GIVE_UP_SECONDS:
            place, words = next(iter(stopped.items()))
            raise InputError(
                f"the text to go on with does not arrive: {words}",
                where=place,
                fix=f"run the same olm-data tokenize command with --output {typed(place)}: it "
                "keeps what is done; then run this again, which goes on, too",
            )
        every = "; ".join(f"{place}: {words}" for place, (_, words) in told.items())
        return f"waiting for text, {duration(now - self._begun)} so far: {every}"


def _told(place: str) -> tuple[bool, str]:
    """Return whether tokenising into a folder goes on, and how far it is, in words."""
    try:
        status = read_status(place)
    except InputError:
        return False, "nothing is tokenised into it yet"
    far = f"{status.done:,} of {status.tasks:,} shards"
    if status.state in ("running", "finishing", "complete"):
        left = status.seconds_left
        rest = "" if left is None else f", about {duration(left)} left"
        return True, f"tokenize has {far} ({status.text_bytes_per_second / 1e6:.1f} MB/s{rest})"
    why = f": {status.error}" if status.error else ""
    return False, f"tokenize has stopped at {far} ({status.state}{why}); run it again"
