"""The thread that writes: all requests together, each told of as it grows, none left waiting."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.talking import save_talker

from olm_data.errors import InputError, ResourceError, UsageError
from olm_train.extensions.generate.engine import Engine, TextRequest
from olm_train.extensions.generate.loaded import LoadedModel
from olm_train.extensions.generate.runner import Read, TextRunner
from olm_train.extensions.generate.sampling import Sampling
from olm_train.extensions.generate.text import TextStream
from olm_train.extensions.serve.worker import MAX_WAITING, NewText, TextJob, Worker


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = save_talker(tmp_path_factory.mktemp("worker"))
    return LoadedModel.open(str(folder), "latest", print, device=torch.device("cpu"))


def request(seed: int, **options: Any) -> TextRequest:
    return TextRequest(
        prompt=(5 + seed, 6, 7),
        sampling=Sampling(seed=seed),
        **{"max_new_tokens": 12, "logprobs": 0, **options},
    )


def whole(pieces: Sequence[NewText]) -> tuple[str, list[int], str | None]:
    tokens = [score.token for piece in pieces for score in piece.scores]
    return "".join(piece.text for piece in pieces), tokens, pieces[-1].finish


def test_pieces_are_the_texts_that_an_engine_writes_alone(loaded: LoadedModel) -> None:
    alone = loaded.engine().run([request(seed) for seed in range(6)])
    with Worker(loaded.engine(4)) as worker:
        jobs = [worker.submit([request(seed), request(seed + 3)]) for seed in range(3)]
        for seed, job in enumerate(jobs):
            pieces = list(job)
            for number, text in ((0, alone[seed]), (1, alone[seed + 3])):
                own = [piece for piece in pieces if piece.number == number]
                assert whole(own) == (text.text, text.ids, text.finish)
                assert own[-1].tokens == len(text.ids)
                assert len(own) > 3  # not all at the end


def test_a_request_that_cannot_be_answered_says_so_and_leaves_the_others(
    loaded: LoadedModel,
) -> None:
    with Worker(loaded.engine()) as worker:
        good = worker.submit([request(1)])
        bad = worker.submit([request(1), request(2, max_new_tokens=0), TextRequest(prompt=())])
        with pytest.raises(UsageError, match="no token"):
            list(bad)
        assert whole(list(good))[1]
        assert whole(list(worker.submit([request(2)])))[1]


def test_what_nobody_reads_is_given_up(loaded: LoadedModel) -> None:
    with Worker(loaded.engine(1)) as worker:
        first = worker.submit([request(1, max_new_tokens=90)])
        next(iter(first))
        first.drop()
        assert whole(list(worker.submit([request(2, max_new_tokens=2)])))[1]
        with pytest.raises(ResourceError, match="wait"):
            worker.submit([request(1)] * (MAX_WAITING + 1))
        many = worker.submit([request(1, max_new_tokens=90)] * MAX_WAITING)
        many.drop()
        assert whole(list(many)[-1:])[2] == "length"
        assert whole(list(worker.submit([request(3, max_new_tokens=1)])))[1]


def test_its_end_is_told_to_who_waits_and_to_who_asks(loaded: LoadedModel) -> None:
    with Worker(loaded.engine()) as worker:
        job = worker.submit([request(1, max_new_tokens=90)])
    with pytest.raises(ResourceError, match="stopping"):
        list(job)
    with pytest.raises(ResourceError, match="stopping"):
        worker.submit([request(1)])
    assert not [each for each in threading.enumerate() if each.name == "olm-generate"]


class Broken(TextRunner):
    def __init__(self) -> None: ...

    def prefill(
        self, prompts: Sequence[Sequence[int]], reads: Sequence[Read | None] = ()
    ) -> tuple[torch.Tensor, list[Any]]:
        raise RuntimeError("out of memory")

    def decode(self, tokens: Sequence[int]) -> torch.Tensor:
        raise AssertionError

    def remove(self, row: int) -> None: ...


def test_a_model_that_fails_is_told_too() -> None:
    with Worker(Engine(Broken())) as worker:
        job: TextJob = worker.submit([request(1)])
        with pytest.raises(RuntimeError, match="out of memory"):
            list(job)
        with pytest.raises(ResourceError, match="out of memory"):
            worker.submit([request(1)])


class Pyo3Panic(BaseException): ...


Pyo3Panic.__name__ = "PanicException"


@pytest.mark.parametrize("from_length", [1, 4], ids=["prompt", "text"])
@pytest.mark.parametrize("kind", [ValueError, Pyo3Panic])
def test_a_text_that_cannot_be_written_ends_its_own_request_alone(
    loaded: LoadedModel,
    kind: type[BaseException],
    from_length: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decode = TextStream._decode

    def fails(self: TextStream, ids: Sequence[int]) -> str:
        if 77 in ids and len(ids) >= from_length:
            raise kind("no such id")
        return decode(self, ids)

    expected = loaded.engine().run([request(seed) for seed in range(3)])
    monkeypatch.setattr(TextStream, "_decode", fails)
    with Worker(loaded.engine()) as worker:
        good = [worker.submit([request(seed)]) for seed in range(2)]
        bad = worker.submit([TextRequest(prompt=(5, 6, 77)), request(4)])
        with pytest.raises(InputError, match="no such id"):
            list(bad)
        good.append(worker.submit([request(2)]))
        for job, text in zip(good, expected, strict=True):
            assert whole(list(job)) == (text.text, text.ids, text.finish)
