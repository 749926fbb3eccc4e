"""The flat form that the shape of a decoder had before its parts, and where each field went.

    config.json of a checkpoint or an export --from_flat--> fields of `DecoderConfig`
    train.yaml --refuse_flat--> an error that names the new place of each field

Pure, and knows no part: whatever is read from the result checks it.
"""

from __future__ import annotations

from olm_data.bounded_json import JsonObject
from olm_data.config.values import Values
from olm_data.errors import UsageError

FLAT: dict[str, tuple[str, str] | tuple[str, str, str]] = {
    "feed_forward": ("feed_forward", "name"),
    "hidden_size": ("feed_forward", "hidden_size"),
    "block": ("block", "name"),
    "norm": ("norm", "name"),
    "norm_eps": ("norm", "eps"),
    "norm_bias": ("norm", "bias", "layer_norm"),
    "norm_zero_centred": ("norm", "zero_centred", "rms_norm"),
    "qk_norm": ("attention", "qk_norm"),
    "shift_keys": ("attention", "shift_keys"),
    "positions": ("positions", "name"),
    "max_positions": ("positions", "max_positions", "learned"),
    "rope_theta": ("positions", "theta", "rope"),
    "rope_theta_windowed": ("positions", "theta_windowed", "rope"),
    "rope_scaling": ("positions", "scaling", "rope"),
    "rope_scaling_windowed": ("positions", "scaling_windowed", "rope"),
    "no_rope_layer_interval": ("positions", "no_rope_layer_interval", "rope"),
    "sliding_window": ("attention", "sliding_window"),
    "query_pre_attn_scalar": ("attention", "query_pre_attn_scalar"),
    "attention_softcap": ("attention", "softcap"),
    "attention": ("attention", "backend"),
    "tie_embeddings": ("head", "tied"),
    "logit_softcap": ("head", "softcap"),
}
"""Old name -> part and field of now, and the kind of the part that has it: of other kinds its value
was without effect. `bias` is in two."""

_BIASES = (
    (None, None, False),
    ("qkv", "qkv", False),
    ("attention", "all", False),
    ("all", "all", True),
)
"""Old `bias`, `attention.bias`, `feed_forward.bias`."""
_PARTS = {place[0] for place in FLAT.values()}
_KINDS = {"norm": "rms_norm", "positions": "rope"}
"""Kinds where the flat form named none."""
_ALWAYS = {"d_model", "n_layers", "n_heads", "tie_embeddings", "init_std"}
"""Recorded of every decoder; the shape of another module has not all of these names."""
_BACKENDS = ("auto", "sdpa", "math", "varlen", "flex", "flash")


def from_flat(model: JsonObject) -> JsonObject:
    """Return a recorded shape in the form of now; any other record as it is."""
    if not model.keys() >= _ALWAYS or any(isinstance(model.get(part), dict) for part in _PARTS):
        return model
    kinds = {part: model.get(part, usual) for part, usual in _KINDS.items()}
    parts: dict[str, JsonObject] = {"attention": {"name": "grouped_query"}}
    for name, (part, field, *kind) in FLAT.items():
        if name in model and kind in ([], [kinds.get(part)]):
            parts.setdefault(part, {})[field] = model[name]
    if "bias" in model:
        known = (new for old, *new in _BIASES if old == model["bias"])
        attention, feed_forward = next(known, (model["bias"], False))
        parts["attention"]["bias"] = attention
        parts.setdefault("feed_forward", {})["bias"] = feed_forward
    return {name: each for name, each in model.items() if name not in FLAT | {"bias": 0}} | parts


def refuse_flat(values: Values) -> None:
    """Refuse fields of the flat form under `model`, in a configuration that somebody wrote.

    Raises:
        UsageError: names the new place of each.
    """
    model = values.data.get("model")
    if not isinstance(model, dict) or "name" in model:  # a class of one's own has its own fields
        return
    moved = {"bias": "model.attention.bias and model.feed_forward.bias"} | {
        name: f"model.{part}.{field}"
        for name, (part, field, *_) in FLAT.items()
        if name not in _PARTS or (name == "attention" and model.get(name) in _BACKENDS)
    }
    if found := [name for name in model if name in moved]:
        raise UsageError(
            "; ".join(f"model.{name} is now {moved[name]}" for name in found),
            where=values.where(("model", found[0])),
            why="what is of one kind stands together, under the part that it is of",
            fix="write it there, as in model: {norm: {name: rms_norm, eps: 1e-5}}",
        )
