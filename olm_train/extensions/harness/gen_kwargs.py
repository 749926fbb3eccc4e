"""What a task of lm_eval wishes of a text: its `generation_kwargs`, each known or refused.

generation_kwargs -> Wishes: stop strings, a length, how tokens are chosen
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from olm_data.errors import UsageError, suggest
from olm_train.generate.sampling import Sampling

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the same wish; of several the first counts, as in lm_eval."""
KNOWN = {*LENGTHS, "until", "do_sample", "temperature", "num_beams", "seed"}
SHARES = ("top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Wishes:
    """How a text is to be written.

    Attributes:
        until: strings that end it.
        max_gen_toks: tokens of it at most.
        sampling: how tokens are chosen; its seed is that of the first text.
    """

    until: tuple[str, ...]
    max_gen_toks: int
    sampling: Sampling

    @classmethod
    def of(cls, given: Mapping[str, Any], max_gen_toks: int) -> Wishes:
        """Return the wishes of a request.

        Args:
            given: its `generation_kwargs`.
            max_gen_toks: where they say no length.

        Raises:
            UsageError: one is not known, or out of range.
        """
        for name in given:
            if name not in KNOWN and name not in SHARES:
                raise UsageError(
                    f"generation_kwargs has {name}, which is not known here",
                    why="without it the texts would be other ones",
                    fix=suggest(name, sorted({*KNOWN, *SHARES})),
                )
        if given.get("num_beams") not in (None, 1):
            raise UsageError("there is no beam search here", where="num_beams", fix="leave it out")
        until = given.get("until") or ()
        lengths = [given[name] for name in LENGTHS if given.get(name) is not None]
        length = int(lengths[0]) if lengths else max_gen_toks
        if length < 1:
            raise UsageError(f"a text has 1 token or more, not {length}", where="max_gen_toks")
        shares = {name: given[name] for name in SHARES if given.get(name) is not None}
        if "top_k" in shares:
            shares["top_k"] = max(0, shares["top_k"])  # vLLM's -1: all
        sampling = Sampling(
            temperature=_temperature(given), seed=int(given.get("seed") or 0), **shares
        )
        return cls((until,) if isinstance(until, str) else tuple(until), length, sampling)

    def cut(self, text: str) -> str:
        """Return a text up to the first of its stop strings."""
        for stop in self.until:
            text = text.partition(stop)[0] if stop else text
        return text


def _temperature(given: Mapping[str, Any]) -> float:
    """Return 0, which takes the most likely token, unless a task says that texts are drawn."""
    sampled, temperature = given.get("do_sample"), given.get("temperature")
    if sampled is False:
        return 0.0
    if temperature is None:
        return 1.0 if sampled else 0.0
    return float(temperature)
