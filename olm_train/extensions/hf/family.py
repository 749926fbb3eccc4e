"""A family of transformers' models, as data: rows for the configuration, names for the tensors.

config.json --config_from_hf--> DecoderConfig --config_to_hf--> config.json
DecoderConfig --tensors--> each parameter of ours, and the tensors of theirs it is made of
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from olm_data.errors import InputError, OlmError, UsageError, printable
from olm_train.extensions.hf.fields import (
    ConfigReader,
    Json,
    Ours,
    Problem,
    Problems,
    Row,
    is_root,
    nested,
    ours_of,
    shown,
)
from olm_train.extensions.hf.tensors import TensorMap, TensorPart
from olm_train.model.config import VOCABULARY_TABLES, DecoderConfig
from olm_train.model.decoder import Decoder
from olm_train.model.feed_forward import DenseFeedForward
from olm_train.model.layers import LinearLayer
from olm_train.model.mixture import BiasBalance, MixtureConfig
from olm_train.model.positions import RoPEConfig

FREE = (
    "attention.backend",
    "vocab_multiple",
    "feed_forward.balance",
    "feed_forward.z_loss",
    "feed_forward.capacity_factor",
)
"""Fields of ours that are not of the model's maths; no config.json holds them."""

_HARMLESS = """
    _name_or_path architectures attention_dropout attn_pdrop bos_token_id chunk_size_feed_forward
    decoder_start_token_id dtype embd_pdrop eos_token_id finetuning_task id2label label2id
    max_position_embeddings model_type num_labels output_attentions output_hidden_states
    pad_token_id prefix pretraining_tp problem_type resid_pdrop return_dict sep_token_id
    task_specific_params tokenizer_class torch_dtype torchscript transformers_version unk_token_id
    use_bfloat16 use_cache
"""
_OF_GENERATION = """
    bad_words_ids begin_suppress_tokens cache_implementation diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
    forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores
    remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens temperature
    top_k top_p typical_p
"""
"""Older versions wrote these here."""
_OF_PROGRAMS = """
    _attn_implementation_autoset _flash_attn_2_enabled attn_implementation unsloth_fixed
    unsloth_version
"""
"""Marks that other programs leave."""

IGNORED = frozenset((_HARMLESS + _OF_GENERATION + _OF_PROGRAMS).split())
"""Fields of a config.json that change no logit. Dropout is one: it is off at inference, and our
decoder has none in training."""

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({}, []),
    "tf_legacy_loss": (False,),
    "tie_encoder_decoder": (False,),
}
"""Fields of a config.json that change nothing as long as they have one of these values."""

_BUFFERS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)$")
"""Tensors that older files hold and that follow from the configuration."""


@dataclass(frozen=True, kw_only=True)
class Names:
    """Names of modules, ours to theirs.

    Attributes:
        prefix: of all of theirs but the head; files of a model without a head lack it.
        layer: of a block's, with {} for its number, after the prefix.
        modules: outside of the blocks: our module -> theirs. The head's has no prefix.
        blocks: within a block: our module -> theirs, one below the other. Of a parameter with an
            expert a row: its name -> theirs, with {} for the expert's number.
        transposed: modules of ours whose weights they keep transposed.
    """

    prefix: str
    layer: str
    modules: Mapping[str, str]
    blocks: Mapping[str, tuple[str, ...]]
    transposed: Collection[str] = ()


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models.

    Attributes:
        name: ours.
        architecture, model_type: of the class in transformers, as in a config.json; the second
            is the name by default.
        rows: how fields of theirs and ours are each other. Fields of ours that no row answers for
            keep their defaults.
        names: of tensors.
        ignored: fields of theirs that change nothing in this family, beside `IGNORED`.
    """

    name: str
    architecture: str
    model_type: str = ""
    rows: tuple[Row, ...]
    names: Names
    ignored: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "model_type", self.model_type or self.name)

    def config_from_hf(self, fields: Json) -> DecoderConfig:
        """Return the shape of the model that a config.json is of, as `canonical` gives it.

        Args:
            fields: the content of the config.json, of transformers 4 or 5.

        Raises:
            InputError: our decoder is not that model, or a field is not known; names each of them.
        """
        given, ours = ConfigReader(fields), dict[str, object]()
        for row in self.rows:
            ours |= row.read(given)
        problems = [*given.problems, *self._unknown(given)]
        if not problems:
            try:
                config = canonical(DecoderConfig(**nested(_effective(ours))))
            except OlmError as error:
                problem = Problem(error.where or "config.json", error.what)
                problems.append(self._in_their_words(problem))
            else:
                problems += map(self._in_their_words, self.problems(config))
        if problems:
            raise InputError(
                f"our decoder cannot be this {self.architecture}: " + _listed(problems),
                where="config.json",
                why="its logits would be others than those of transformers",
                fix="use another model; a field that changes no logit may be taken out of a copy "
                "of its config.json",
            )
        return config

    def config_to_hf(
        self,
        config: DecoderConfig,
        *,
        max_position_embeddings: int | None = None,
        dtype: str = "float32",
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
    ) -> Json:
        """Return the content of a config.json for a shape, without `transformers_version`.

        RoPE is written in the form of transformers 5 and in the flat one of 4, `dtype` under both
        of its names; every field that has a default there is written, so that no reader's default
        counts.

        Args:
            config: the shape.
            max_position_embeddings: tokens of the longest document that the model is for; with
                learned positions it follows from the shape.
            dtype: of the weights in the files.
            bos_token_id, eos_token_id: written as they are, null included, as is the id that pads:
                their defaults are ids of somebody else's tokenizer.

        Raises:
            UsageError: no model of the family is of that shape; names each field that prevents it.
        """
        written, problems = self._written(canonical(config))
        if problems:
            raise UsageError(
                f"a model of this shape is no {self.architecture}: " + _listed(problems),
                where="model",
                fix="train it with these fields, or export it in our own format",
            )
        positions = config.max_positions or max_position_embeddings
        if positions is None:
            raise UsageError(
                "max_position_embeddings is not given",
                where="max_position_embeddings",
                why="it follows from the data the model was trained on, not from its shape",
                fix="give the sequence length",
            )
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **written,
            **({} if config.max_positions else {"max_position_embeddings": positions}),
            "use_cache": True,
            "bos_token_id": bos_token_id,
            "eos_token_id": eos_token_id,
            "pad_token_id": None,
            "dtype": dtype,
            "torch_dtype": dtype,
        }

    def problems(self, config: DecoderConfig) -> list[Problem]:
        """Return what prevents a shape from being a model of this family, nothing if it is one."""
        return self._written(canonical(config))[1]

    def tensors(self, config: DecoderConfig) -> tuple[TensorMap, ...]:
        """Return each parameter of ours, in the model's order, and how theirs make it up."""
        model, names = Decoder(config, device="meta"), self.names
        found = []
        for name, parameter in model.named_parameters():
            module, _, leaf = name.rpartition(".")
            shape = tuple(parameter.shape)
            if len(shape) == 3:
                found.append(TensorMap(name, shape, self._of_experts(name, shape)))
                continue
            rows = config.vocab_size if name in VOCABULARY_TABLES else shape[0]
            theirs, transposed = self._module(module)
            sizes: tuple[int, ...] = (rows,)
            if len(theirs) > 1:
                linear = model.get_submodule(module)
                assert isinstance(linear, LinearLayer), module
                sizes = linear.parts
            parts, first = [], 0
            for one, size in zip(theirs, sizes, strict=True):
                their_shape = (size, *shape[1:])
                turn = transposed and len(shape) == 2
                parts.append(
                    TensorPart(
                        name=f"{one}.{leaf}",
                        shape=their_shape[::-1] if turn else their_shape,
                        first=first,
                        rows=size,
                        transposed=turn,
                    )
                )
                first += size
            tied = config.head.tied and module == "embeddings"
            copies = (f"{names.modules['lm_head']}.{leaf}",) if tied else ()
            found.append(TensorMap(name, shape, tuple(parts), copies))
        return tuple(found)

    def _of_experts(self, name: str, shape: tuple[int, ...]) -> tuple[TensorPart, ...]:
        """Return what a parameter [E, rows, columns] is made of."""
        experts, rows, columns = shape
        theirs, _ = self._module(name)
        size = rows // len(theirs)
        return tuple(
            TensorPart(
                name=f"{each.format(expert)}.weight",
                shape=(size, columns),
                first=expert,
                rows=1,
                within=slice(place * size, (place + 1) * size),
            )
            for expert in range(experts)
            for place, each in enumerate(theirs)
        )

    def stored_names(self, config: DecoderConfig, stored: Iterable[str]) -> dict[str, str]:
        """Return where each tensor of `tensors(config)` lies in files: its name there.

        Files of a model without a head lack the prefix of the names. Tensors that follow from the
        configuration, and copies of a tied table, may be there and are not in the result.

        Args:
            stored: names of all tensors in the files.

        Raises:
            InputError: some are missing, or are of no parameter; names them.
        """
        prefix, there = self.names.prefix, set(stored)
        maps = self.tensors(config)
        wanted = [part.name for each in maps for part in each.parts]
        found = {
            name: stored_name
            for name in wanted
            for stored_name in (name, name.removeprefix(prefix))
            if stored_name in there
        }
        found |= {name: name for name in wanted if name in there}
        copies = {name for each in maps for name in each.copies}
        missing = [name for name in wanted if name not in found]
        left = there - set(found.values()) - copies
        unknown = sorted(name for name in left if not _BUFFERS.search(name))
        if missing or unknown:
            said = [
                f"{len(each):,} {word} ({_some(each)})"
                for each, word in ((missing, "missing"), (unknown, "of no parameter"))
                if each
            ]
            raise InputError(
                f"the tensors are not those of a {self.architecture} of this config.json: "
                + ", ".join(said),
                fix="use the config.json that belongs to these weights, and all of their files",
            )
        return found

    def _written(self, config: DecoderConfig) -> tuple[Json, list[Problem]]:
        """Return fields of theirs, and what prevents them from being those of the shape."""
        problems, written = Problems(), dict[str, object]()
        for row in self.rows:
            written |= row.write(config, problems)
        return written, [*problems, *self._unanswered(config)]

    def _in_their_words(self, problem: Problem) -> Problem:
        """Return what is wrong with a shape, said of the fields of a config.json."""
        theirs = {
            name: leaf if (leaf := name.rpartition(".")[2]) in row.theirs else row.theirs[0]
            for row in self.rows
            for name in row.ours[:1]
            if row.theirs
        }
        said = str(problem).removeprefix(f"{DecoderConfig.__name__} ")
        field, _, why = re.sub(
            r"\w+(\.\w+)*", lambda word: theirs.get(word[0], word[0]), said
        ).partition(" ")
        return Problem(field, why)

    def _module(self, module: str) -> tuple[list[str], bool]:
        """Return the modules of theirs that one of ours is, and whether they keep it transposed."""
        names = self.names
        if not module.startswith("blocks."):
            prefix = "" if module == "lm_head" else names.prefix
            return [prefix + names.modules[module]], module in names.transposed
        _, number, inner = module.split(".", 2)
        layer = names.prefix + names.layer.format(number)
        return [layer + each for each in names.blocks[inner]], inner in names.transposed

    def _unknown(self, given: ConfigReader) -> list[Problem]:
        found = []
        for name, value in given.unread().items():
            if name in IGNORED or name in self.ignored:
                continue
            if name in NEUTRAL and value in NEUTRAL[name]:
                continue
            found.append(Problem(printable(name[:60]), f"is {shown(value)}, and is not known here"))
        return found

    def _unanswered(self, config: DecoderConfig) -> list[Problem]:
        """Return fields of ours that no row answers for and that are not at their defaults."""
        if type(config) is not DecoderConfig:
            return [Problem("model", f"is a {type(config).__name__}, a class of one's own")]
        answered = {*FREE, *(name for row in self.rows for name in row.ours)}
        usual = ours_of(DecoderConfig(vocab_size=1, d_model=2, n_layers=1, n_heads=1))
        return [
            Problem(name, f"is {shown(value)}", f"{name}={shown(usual[name])}")
            for name, value in ours_of(config).items()
            if name not in answered and name in usual and value != usual[name]
        ]


def canonical(config: DecoderConfig) -> DecoderConfig:
    """Return the same model with defaults filled in, and without what is not of its maths."""
    attention, ffn, rope = config.attention, config.feed_forward, config.positions
    windows = [-1 if window is None else window for window in config.windows]
    scalar, root = attention.query_pre_attn_scalar, config.d_model**0.5
    windowed = set(windows) != {-1}
    if isinstance(ffn, DenseFeedForward):
        ffn = replace(ffn, hidden_size=ffn.width(config))
    if isinstance(ffn, MixtureConfig):  # a bias has a say in who is chosen, a loss has none
        bias = ffn.balance if isinstance(ffn.balance, BiasBalance) else None
        ffn = replace(ffn, balance=bias, z_loss=0.0, capacity_factor=None)
    if isinstance(rope, RoPEConfig):
        every, theta = rope.no_rope_layer_interval, rope.theta_windowed
        rope = replace(
            rope,
            theta_windowed=None if theta == rope.theta or not windowed else theta,
            scaling_windowed=rope.scaling_windowed or not windowed,
            no_rope_layer_interval=None if every is None or every > config.n_layers else every,
        )
    return replace(
        config,
        vocab_multiple=1,
        n_kv_heads=config.kv_heads,
        head_dim=config.head_size,
        embed_scale=root if is_root(config.embed_scale, config.d_model) else config.embed_scale,
        attention=replace(
            attention,
            sliding_window=_period(windows) if windowed else None,
            query_pre_attn_scalar=None if scalar == config.head_size else scalar,
            backend="auto",
        ),
        feed_forward=ffn,
        positions=rope,
    )


def _period(values: list[int]) -> tuple[int, ...]:
    """Return the shortest list that is the values when it is repeated; the last time in part."""
    for length in range(1, len(values)):
        if all(value == values[i % length] for i, value in enumerate(values)):
            return tuple(values[:length])
    return tuple(values)


def _effective(ours: dict[str, object]) -> Ours:
    """Return fields without those of layers with a window, where there is none or no effect."""
    without: dict[str, object] = {}
    if not ours.get("attention.sliding_window"):
        without = {"positions.theta_windowed": None, "positions.scaling_windowed": True}
    elif ours.get("positions.scaling") is None:
        without = {"positions.scaling_windowed": True}
    return ours | {name: value for name, value in without.items() if name in ours}


def _listed(problems: Iterable[Problem]) -> str:
    return "; ".join(str(problem) for problem in problems)


def _some(names: Collection[str]) -> str:
    first = [printable(name[:80]) for name in sorted(names)[:4]]
    return ", ".join(first) + (", ..." if len(names) > len(first) else "")
