"""The engine and its cache: a batch is its single texts, and a cache changes nothing."""

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
from support.hf_talker import save_hf_talker, theirs
from support.model_options import CONFIG, EXPERTS, FAMILIES, OLMO3, stirred
from support.small_tokenizer import train
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from olm_data.errors import InputError, UsageError, ValidationError
from olm_train.extensions.generate.cache import LayerCache
from olm_train.extensions.generate.engine import Engine, TextRequest
from olm_train.extensions.generate.loaded import LoadedModel, PromptIds
from olm_train.extensions.generate.runner import (
    CachedRunner,
    Read,
    TextRunner,
    WholeRunner,
    knows_cache,
    runner_of,
)
from olm_train.extensions.generate.sampling import Sampling
from olm_train.extensions.generate.template import Message
from olm_train.model.block import Block
from olm_train.model.decoder import Decoder
from olm_train.model.head import Head
from olm_train.model.rope import Llama3Scaling, PositionInterpolation, YaRNScaling

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


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loaded")
    model = stirred(
        CONFIG.changed(vocab_size=300, positions={"name": "learned", "max_positions": 20})
    )
    tokenizer = Tokenizer.from_file(str(train(folder / "tokenizer.json")))
    model.save(folder / "model", tokenizer)
    return folder / "model"


def test_a_saved_model_writes_up_to_its_positions(saved: Path) -> None:
    loaded = LoadedModel.open(str(saved), "latest", print, device=torch.device("cpu"))
    assert (loaded.rules.begins, loaded.rules.eos, loaded.context) == (None, 0, 20)
    engine = loaded.engine(2)
    from olm_train.extensions.generate.engine import TextRequest

    (text,) = engine.run([TextRequest(prompt=loaded.ids_of("abc"), max_new_tokens=50)])
    assert text.finish == "stop" or len(loaded.ids_of("abc")) + len(text.ids) == 20


def test_prompts_begin_as_documents_do(saved: Path) -> None:
    tokenizer = Tokenizer.from_file(str(saved / "tokenizer.json"))
    ids = tuple(tokenizer.encode("cat").ids)
    assert PromptIds(tokenizer, None, 0, 300, "here")("cat") == ids
    assert PromptIds(tokenizer, 5, 0, 300, "here")("cat") == (5, *ids)
    assert PromptIds(tokenizer, None, 0, 300, "here")("") == (0,)
    with pytest.raises(UsageError, match="no token"):
        PromptIds(tokenizer, None, None, 300, "here")("")
    with pytest.raises(ValidationError, match="knows only 3"):
        PromptIds(tokenizer, None, 0, 3, "here")("cat")


def test_a_prompt_that_the_tokenizer_cannot_encode_is_an_error_of_the_tokenizer() -> None:
    words = Tokenizer(WordLevel({"the": 0, "cat": 1}))  # and no token for other words
    words.pre_tokenizer = Whitespace()
    ids_of = PromptIds(words, None, 0, 2, "here")
    assert ids_of("the cat") == (0, 1)
    for asked in (ids_of, ids_of.plain):
        with pytest.raises(InputError, match="fails to encode this prompt"):
            asked("the dog")


@pytest.mark.parametrize("begin", [True, False])
def test_conversations_of_a_model_of_transformers_have_its_ids(tmp_path: Path, begin: bool) -> None:
    folder = save_hf_talker(tmp_path / "talker", begin=begin)
    loaded = LoadedModel.open(str(folder), "latest", print, device=torch.device("cpu"))
    tokenizer = theirs(folder)[1]
    assert list(loaded.ids_of("the cat")) == tokenizer("the cat")["input_ids"]
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages[0]['content'] }}")  # spells no token that begins it
    for path in (None, own):
        template = loaded.template(path)
        said = template.prompt([Message("user", "the cat")])
        expected = tokenizer.apply_chat_template(
            [{"role": "user", "content": "the cat"}],
            add_generation_prompt=True,
            return_dict=True,
            chat_template=None if path is None else path.read_text(),
        )["input_ids"]
        assert list(loaded.ids_of(said, whole=template.whole)) == expected


SCALINGS = [
    None,
    PositionInterpolation(factor=4),
    Llama3Scaling(factor=8, old_context_len=32),
    YaRNScaling(factor=4, old_context_len=64),
]
window = st.one_of(st.just(-1), st.integers(1, 12))
shapes = st.fixed_dictionaries(
    {
        "n_kv_heads": st.sampled_from([1, 2, 4]),
        "attention": st.fixed_dictionaries(
            {
                "sliding_window": st.one_of(st.none(), st.tuples(window, window)),
                "qk_norm": st.sampled_from([None, "head", "full"]),
                "softcap": st.sampled_from([None, 0.5]),
                "query_pre_attn_scalar": st.sampled_from([None, 3.0]),
            }
        ),
        "positions": st.fixed_dictionaries(
            {
                "scaling": st.sampled_from(SCALINGS),
                "no_rope_layer_interval": st.sampled_from([None, 2]),
                "theta_windowed": st.sampled_from([None, 50.0]),
            }
        ),
        "head": st.fixed_dictionaries({"softcap": st.sampled_from([None, 5.0])}),
        "norm": st.fixed_dictionaries({"zero_centred": st.booleans()}),
    }
).map(
    lambda shape: (
        shape
        if shape["attention"]["sliding_window"]
        else shape | {"positions": shape["positions"] | {"theta_windowed": None}}
    )
)
texts = st.lists(st.lists(st.integers(0, 49), min_size=1, max_size=20), min_size=1, max_size=4)


def same(prompts: list[list[int]], more: int, leave: int, model: Decoder) -> None:
    """Feed random tokens to both runners; a row leaves and another comes on the way."""
    runners: list[TextRunner] = [CachedRunner(model, CPU), WholeRunner(model, CPU)]
    draw = torch.Generator().manual_seed(len(prompts))

    def agree(values: list[torch.Tensor]) -> None:
        torch.testing.assert_close(values[0], values[1], rtol=1e-5, atol=1e-5)

    agree([runner.prefill(prompts)[0] for runner in runners])
    rows = len(prompts)
    for step in range(more):
        if step == leave:
            late = [[1, 2, 3, 4, 5, 6, 7]]
            for runner in runners:
                runner.remove(0)
            agree([runner.prefill(late)[0] for runner in runners])
        tokens = torch.randint(50, (rows,), generator=draw).tolist()
        agree([runner.decode(tokens) for runner in runners])


@torch.no_grad()
@settings(deadline=None, max_examples=25)
@given(shapes, texts, st.integers(1, 24), st.integers(0, 10))
def test_cached_logits_are_those_of_the_whole_text(
    shape: dict[str, Any], prompts: list[list[int]], more: int, leave: int
) -> None:
    same(prompts, more, leave, stirred(CONFIG.changed(**shape)))


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_those_of_whole_families_too(family: str) -> None:
    model = stirred(CONFIG.changed(**FAMILIES[family]))
    same([[3], [5, 6, 7, 8, 9, 10, 11, 12], [1, 2]], 14, 3, model)


@torch.no_grad()
@pytest.mark.parametrize("experts", EXPERTS, ids=str)
def test_those_of_experts_too(experts: dict[str, Any]) -> None:
    model = stirred(CONFIG.changed(**experts))
    assert knows_cache(model)
    same([[3], [5, 6, 7, 8, 9, 10, 11, 12], [1, 2]], 14, 3, model)


@torch.no_grad()
def test_the_whole_text_is_what_the_model_says() -> None:
    model = stirred(CONFIG)
    logits, _ = WholeRunner(model, CPU).prefill([[4, 5, 6], [7, 8]])
    for row, ids in zip(logits, ([4, 5, 6], [7, 8]), strict=True):
        torch.testing.assert_close(row, model(torch.tensor([ids]))[0, -1], rtol=1e-5, atol=1e-5)


class OwnBlock(Block):
    """Looks at the token before, besides its attention."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return super().forward(x, *args, **kwargs) + x.roll(1, dims=1)


def test_a_model_that_mixes_tokens_by_itself_has_no_cache() -> None:
    model = stirred(CONFIG)
    assert isinstance(runner_of(model, CPU), CachedRunner)
    for block in model.blocks:
        block.__class__ = OwnBlock
    assert not knows_cache(model)
    assert isinstance(runner_of(model, CPU), WholeRunner)


@torch.no_grad()
def test_idle_leaves_the_texts_alone() -> None:
    runner = CachedRunner(stirred(CONFIG), CPU)
    runner.prefill([[1, 2, 3]])
    other = CachedRunner(stirred(CONFIG), CPU)
    other.prefill([[1, 2, 3]])
    other.idle()
    assert torch.equal(runner.decode([4]), other.decode([4]))


@torch.no_grad()
@settings(deadline=None, max_examples=25)
@given(shape=shapes, size=st.integers(1, 40), chunk=st.integers(1, 9), beside=st.integers(0, 2))
def test_a_prompt_in_parts_is_what_it_is_as_a_whole(
    shape: dict[str, Any], size: int, chunk: int, beside: int
) -> None:
    model = stirred(CONFIG.changed(**shape))
    runners: list[TextRunner] = [CachedRunner(model, CPU, chunk), WholeRunner(model, CPU)]
    draw = torch.Generator().manual_seed(size)
    prompts = [[1, 2, 3]] * beside + [torch.randint(50, (size,), generator=draw).tolist()]

    def read(head: Head, x: torch.Tensor) -> torch.Tensor:
        return head.logits(x)

    for prompt in prompts:  # each alone, so that a long one comes in parts
        found = [runner.prefill([prompt], [read]) for runner in runners]
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        assert found[0][1][0].shape == (len(prompt), 50)
    for _ in range(5):
        tokens = torch.randint(50, (len(prompts),), generator=draw).tolist()
        logits = [runner.decode(tokens) for runner in runners]
        torch.testing.assert_close(logits[0], logits[1], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_no_part_of_a_long_prompt_is_larger_than_a_chunk() -> None:
    model, sizes = stirred(CONFIG.changed(attention={"sliding_window": (8, -1)})), list[int]()
    hook = model.embeddings.register_forward_hook(lambda m, given, x: sizes.append(x.shape[1]))
    CachedRunner(model, CPU, 16).prefill([[1] * 70])
    assert sizes == [16, 16, 16, 16, 6]
    sizes.clear()
    CachedRunner(model, CPU, None).prefill([[1] * 70])  # ranks that call it as often as each other
    assert sizes == [70]
    hook.remove()


def test_room_doubles_and_a_ring_stays_as_large_as_its_window() -> None:
    like = torch.zeros(1, 2, 4)
    sizes = {}
    for window in (None, 6):
        layer = LayerCache(window)
        sizes[window] = [layer.reserve(like, 1, n)[0].shape[2] for n in (3, 4, 5, 6, 7, 30)]
    assert sizes == {None: [3, 6, 6, 6, 12, 30], 6: [3, 6, 6, 6, 6, 6]}
    assert layer.reserve(like, 3, 1)[0].shape == (3, 2, 6, 4)
