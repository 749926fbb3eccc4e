"""The engine: a batch is its single texts, whenever they come; each ends for its own reason."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.model_options import CONFIG, OLMO3, stirred
from support.small_tokenizer import train
from tokenizers import Tokenizer

from olm_data.errors import UsageError
from olm_train.extensions.generate.engine import Engine, TextRequest
from olm_train.extensions.generate.runner import CachedRunner, Read, TextRunner, WholeRunner
from olm_train.extensions.generate.sampling import Sampling
from olm_train.model.decoder import Decoder

CPU = torch.device("cpu")


class Chain(TextRunner):
    """Logits that are a function of the last token alone."""

    def __init__(self, logits: dict[int, list[float]]) -> None:
        self.logits, self.calls = logits, [0, 0]

    def prefill(
        self, prompts: Sequence[Sequence[int]], reads: Sequence[Read | None] = ()
    ) -> tuple[torch.Tensor, list[Any]]:
        self.calls[0] += 1
        return torch.tensor([self.logits[ids[-1]] for ids in prompts]), [None] * len(prompts)

    def decode(self, tokens: Sequence[int]) -> torch.Tensor:
        self.calls[1] += 1
        return torch.tensor([self.logits[token] for token in tokens])

    def remove(self, row: int) -> None:
        pass


GREEDY = Sampling(temperature=0)
RING = {n: [9.0 if other == (n + 1) % 5 else 0.0 for other in range(5)] for n in range(5)}


@pytest.fixture(scope="module")
def model() -> Decoder:
    return stirred(CONFIG.changed(**OLMO3, init_std=0.2))


def test_it_ends_at_the_end_of_document_and_leaves_it_out() -> None:
    (text,) = Engine(Chain(RING), ends=(3,)).run([TextRequest(prompt=(0,), sampling=GREEDY)])
    assert (text.ids, text.finish) == ([1, 2], "stop")


def test_it_ends_after_so_many_tokens_and_where_the_context_does() -> None:
    asked = [
        TextRequest(prompt=(0,), sampling=GREEDY, max_new_tokens=2),
        TextRequest(prompt=(0, 0, 0), sampling=GREEDY, max_new_tokens=9),
        TextRequest(prompt=(0,) * 5, sampling=GREEDY, max_new_tokens=0),
    ]
    texts = Engine(Chain(RING), context=5).run(asked)
    assert [text.ids for text in texts] == [[1, 2], [1, 2], []]
    assert {text.finish for text in texts} == {"length"}
    with pytest.raises(UsageError, match="5 tokens, and the model looks at 5"):
        Engine(Chain(RING), context=5).add(TextRequest(prompt=(0,) * 5))
    with pytest.raises(UsageError, match="no token"):
        Engine(Chain(RING)).add(TextRequest(prompt=()))
    with pytest.raises(UsageError, match="stop strings"):
        Engine(Chain(RING)).add(TextRequest(prompt=(1,), stop=("a",)))


@pytest.mark.parametrize("options", [{}, {"sampling": Sampling(seed=1), "logprobs": 1}])
def test_logits_that_are_no_numbers_end_their_own_text_only(options: dict[str, Any]) -> None:
    chain = Chain({**RING, 2: [math.nan] * 5})
    given = {"sampling": GREEDY, "max_new_tokens": 3} | options
    asked = [TextRequest(prompt=(n,), **given) for n in (0, 2, 3)]
    texts = Engine(chain).run(asked)
    assert [text.finish for text in texts] == ["non-finite", "non-finite", "length"]
    assert [text.ids for text in texts] == [[1, 2], [], [4, 0, 1]]


def test_a_row_that_is_free_is_taken_by_the_next() -> None:
    chain = Chain(RING)
    asked = [TextRequest(prompt=(0,), sampling=GREEDY, max_new_tokens=n) for n in (9, 1, 1, 8)]
    engine = Engine(chain, max_rows=2)
    assert [len(text.ids) for text in engine.run(asked)] == [9, 1, 1, 8]
    assert chain.calls[1] < 12  # one after another it would be 15
    assert not engine.busy


def test_prompts_are_packed_up_to_a_limit() -> None:
    calls = {}
    for limit in (4, 100, None):
        chain = Chain(RING)
        asked = [TextRequest(prompt=(0, 1), max_new_tokens=1) for _ in range(5)]
        Engine(chain, prefill_tokens=limit).run(asked)
        calls[limit] = chain.calls[0]
    assert calls == {4: 3, 100: 1, None: 1}


wish = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.8, 2.0]),
    top_p=st.sampled_from([0.8, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    seed=st.integers(0, 99),
)
request = st.builds(
    TextRequest,
    prompt=st.lists(st.integers(0, 49), min_size=1, max_size=16).map(tuple),
    sampling=wish,
    max_new_tokens=st.integers(1, 16),
)


@settings(deadline=None, max_examples=10)
@given(asked=st.lists(request, min_size=1, max_size=6), rows=st.integers(1, 4), late=st.integers())
def test_a_batch_is_its_single_texts(
    model: Decoder, asked: list[TextRequest], rows: int, late: int
) -> None:
    def engine(rows: int) -> Engine:
        return Engine(CachedRunner(model, CPU), ends=(7,), context=40, max_rows=rows)

    alone = [engine(1).run([each])[0] for each in asked]
    together = engine(rows)
    writings = []
    for each in asked:  # they come while others are being written
        writings.append(together.add(each))
        for _ in range(late % 4):
            together.step()
    together.run([])
    assert [text.ids for text in writings] == [text.ids for text in alone]
    assert [text.finish for text in writings] == [text.finish for text in alone]


def test_one_that_is_dropped_leaves_the_others_as_they_were(model: Decoder) -> None:
    asked = [
        TextRequest(prompt=(n, n + 1), sampling=Sampling(seed=n), max_new_tokens=12)
        for n in range(3)
    ]
    whole = Engine(CachedRunner(model, CPU)).run(asked)
    engine = Engine(CachedRunner(model, CPU), max_rows=3)
    texts = [engine.add(each) for each in [*asked, asked[0]]]
    for _ in range(4):
        engine.step()
    engine.drop(texts[0])
    engine.drop(texts[3])
    engine.run([])
    assert [text.ids for text in texts[1:3]] == [text.ids for text in whole[1:3]]
    assert len(texts[0].ids) == 4
    assert texts[3].ids == []


@torch.no_grad()
def test_scores_are_the_models_own(model: Decoder) -> None:
    prompt = (5, 6, 7, 8)
    asked = TextRequest(
        prompt=prompt, sampling=Sampling(temperature=3.0, seed=2), max_new_tokens=5,
        logprobs=3, score_prompt=True,
    )  # fmt: skip
    for runner in (CachedRunner(model, CPU), WholeRunner(model, CPU)):
        text = Engine(runner).run([asked, replace(asked, score_prompt=False)])[0]
        ids = [*prompt, *text.ids]
        known = model(torch.tensor([ids]))[0].log_softmax(-1)
        assert text.prompt_scores[0][1:] == (None, ())
        scores = [*text.prompt_scores, *text.scores]
        assert [score.token for score in scores] == ids
        for place, score in enumerate(scores[1:]):
            assert score.logprob == pytest.approx(known[place, score.token].item(), abs=1e-5)
            best = known[place].topk(3)
            assert [token for token, _ in score.top] == best.indices.tolist()
            assert [value for _, value in score.top] == pytest.approx(
                best.values.tolist(), abs=1e-5
            )


def test_stop_strings_end_a_text_of_characters(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(train(tmp_path / "tokenizer.json")))
    ids = tokenizer.encode("abcdefghij").ids
    follow = dict(zip(ids, [*ids[1:], ids[0]], strict=True))
    size = tokenizer.get_vocab_size()
    chain = Chain({i: [9.0 * (n == follow.get(i)) for n in range(size)] for i in range(size)})
    asked = [
        TextRequest(prompt=(ids[0],), sampling=GREEDY, stop=stop, max_new_tokens=7)
        for stop in (("fg", "zz"), (), ("hi",))
    ]
    texts = Engine(chain, tokenizer).run(asked)
    assert [text.text for text in texts] == ["bcde", "bcdefgh", "bcdefgh"]
    assert [text.finish for text in texts] == ["stop", "length", "length"]
