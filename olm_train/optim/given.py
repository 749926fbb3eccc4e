"""An optimiser that a program gives: any class of `torch.optim` or like one, or an instance.

class, options -> groups of the model's parameters (decay for matrices alone) -> optimiser
instance       -> the parameters that stand now where those stood that it was built with
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from olm_data.bounded_json import JsonObject
from olm_data.config.import_path import load_class
from olm_data.errors import UsageError
from olm_train.optim.base import OptimConfig, no_rates, scaling_of
from olm_train.optim.groups import ParamGroup, parameter_groups
from olm_train.optim.state import class_name, name_of_class, names_of

OptimizerLike = Optimizer | type[Optimizer]


@dataclass(frozen=True, kw_only=True)
class OfAnyClass(OptimConfig):
    """An optimiser that is no configuration of ours, whose groups are its own.

    Attributes:
        kind: its class.
        options: of its constructor.
    """

    kind: str
    options: JsonObject = field(default_factory=dict)

    def build(self, model: nn.Module) -> Optimizer:
        """Return the optimiser over the parameters that the model has now."""
        if scaling_of(model) is not None:
            raise no_rates(self.kind, "how its updates grow with a matrix is not known here")
        return self._build(model, [])  # it makes groups of its own


@dataclass(frozen=True, kw_only=True)
class GivenOptim(OfAnyClass):
    """An optimiser given to a program, as a train module for decoders takes it.

    Made by `given_optim`. What the optimiser has not, such as moments, is 0 here.

    Attributes:
        kind: its class.
        options: given with the class.
    """

    def _build(self, model: nn.Module, groups: list[ParamGroup]) -> Optimizer:
        given, names = vars(self)["given"]
        return built(given, model, vars(self)["as_given"], names)


@dataclass(frozen=True, kw_only=True)
class NamedOptim(OfAnyClass):
    """An optimiser that train.yaml names by its import path, such as `torch.optim:NAdam`.

    Made by `of`. Weight decay is for parameters of two dimensions or more. What the optimiser has
    not, such as moments, is 0 here.

    Attributes:
        kind: import path of its class.
        options: given with the class.
    """

    wraps: ClassVar[type[Optimizer]] = Optimizer

    @classmethod
    def of(cls, path: str, kind: type[Optimizer], options: JsonObject) -> NamedOptim:
        """Return the configuration of a class with these options of its constructor.

        Raises:
            UsageError: see `built`; or no rate is known.
        """
        probe = built(kind, nn.Linear(1, 1), _as_tuples(options), {})
        group = probe.param_groups[0]
        return cls(
            kind=path,
            options=options,
            lr=float(group["lr"]),
            betas=_betas(group),
            weight_decay=float(group.get("weight_decay", 0.0)),
            decay_embeddings=True,
        )

    def plain(self) -> JsonObject:
        """Return what stands in train.yaml."""
        return {"name": self.kind, **self.options}

    def _build(self, model: nn.Module, groups: list[ParamGroup]) -> Optimizer:
        kind = load_class(self.kind, Optimizer, where="train_module.optim.name")
        return built(kind, model, _as_tuples(self.options), {})


def _as_tuples(options: JsonObject) -> JsonObject:
    return {name: tuple(v) if isinstance(v, list) else v for name, v in options.items()}


def given_optim(given: OptimizerLike, model: nn.Module, options: JsonObject) -> GivenOptim:
    """Return the configuration of an optimiser; to be called before the model is spread.

    Raises:
        UsageError: see `built`.
    """
    whole = built(given, model, options, names_of(model))  # says now what is wrong with them
    groups = whole.param_groups
    plain = {name: value for name, value in options.items() if not isinstance(value, Tensor)}
    config = GivenOptim(
        kind=class_name(whole),
        options={n: list(v) if isinstance(v, tuple) else v for n, v in plain.items()},
        lr=max(float(group["lr"]) for group in groups),
        betas=_betas(groups[0]),
        weight_decay=max(float(group.get("weight_decay", 0.0)) for group in groups),
        decay_embeddings=True,
    )
    vars(config).update(given=(given, names_of(model)), as_given=options)
    return config


def built(
    given: OptimizerLike,
    model: nn.Module,
    options: Mapping[str, Any],
    names: Mapping[nn.Parameter, str],
) -> Optimizer:
    """Return the optimiser over the parameters of a model, which may have been spread.

    Args:
        options: of a class. Weight decay is for parameters of two dimensions or more.
        names: of the parameters that an instance was built with.

    Raises:
        UsageError: it needs a closure, has none of the model's parameters, has state of whole
            weights that are sharded now, or options that it is not given.
    """
    if isinstance(given, Optimizer):
        if options:
            raise UsageError("options in `optim` are for an optimiser given as a class")
        optimizer = _moved(given, names, model)
    else:
        try:
            optimizer = given(_groups(model, given, options), **options)
        except (TypeError, ValueError) as error:
            if not any(p.requires_grad for p in model.parameters()):
                raise UsageError(
                    f"the {type(model).__name__} has no parameter to train",
                    where="model",
                    why="each has requires_grad=False" if names else "it has none at all",
                ) from error
            raise UsageError(
                f"{name_of_class(given)} does not take these options",
                why=str(error),
                fix="give in `optim` what its constructor takes",
            ) from error
    _refuse_closure(optimizer)
    for group in optimizer.param_groups:
        group.setdefault("peak_lr", float(group["lr"]))
    return optimizer


def _betas(group: Mapping[str, Any]) -> tuple[float, float]:
    first, second = (*group.get("betas", (0.0, 0.0)), 0.0)[:2]
    return float(first), float(second)


def _groups(
    model: nn.Module, kind: type[Optimizer], options: Mapping[str, Any]
) -> list[ParamGroup]:
    known = inspect.signature(kind).parameters
    decay = options.get("weight_decay", getattr(known.get("weight_decay"), "default", 0.0))
    if "weight_decay" in known:
        return parameter_groups(model, weight_decay=decay, decay_embeddings=True)
    return [{"params": [p for p in model.parameters() if p.requires_grad]}]


def _moved(optimizer: Optimizer, names: Mapping[nn.Parameter, str], model: nn.Module) -> Optimizer:
    """Give an optimiser the parameters that stand in the place of those it was built with."""
    now = dict(model.named_parameters())
    for group in optimizer.param_groups:
        for number, parameter in enumerate(group["params"]):
            name = names.get(parameter)
            if name is None:
                raise UsageError(
                    "the optimiser has parameters that are none of the model's",
                    fix="build it over model.parameters(), or give its class and options",
                )
            if now[name] is not parameter and parameter in optimizer.state:
                raise UsageError(
                    f"{class_name(optimizer)} has state of whole weights, which are sharded now",
                    fix="give its class, and its options as `optim`",
                )
            group["params"][number] = now[name]
    return optimizer


def _refuse_closure(optimizer: Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"{class_name(optimizer)} calls the model itself, several times a step",
            why="a train step computes gradients once",
            fix="choose an optimiser whose step() needs no closure",
        )
