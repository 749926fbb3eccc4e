"""What crosses a module's border has a type: no public name is a ``dict[str, Any]``."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.sources import modules, together, tree

from tests.support.command import REPOSITORY as REPO

pytestmark = together
PACKAGES = ("olm_data", "olm_train")
UNTYPED = ("[str, Any]", "[str, object]")

# Another project's protocol, or a value whose shape only the user knows: "module name": why.
_TORCH = "torch's protocol: tensors and plain values, nested by names"
_OPTIONS = "options of any optimiser"
_PARTS = "what any model takes, by its names"
_SCHEDULER = "a scheduler's own document, which its schema checks"

FREE: dict[str, str] = {
    "olm_data/config/docs.py parts_by_name": "classes of parts, whatever they are",
    "olm_data/printing.py as_html": "values of any kind, by the names they are shown with",
    "olm_data/printing.py record": "values of any kind, by the names they are shown with",
    "olm_train/callbacks/config.py CallbacksConfig.kinds": "classes of parts, whatever they are",
    "olm_train/extensions/auto/module.py NextTokenModule.parts": _PARTS,
    "olm_train/extensions/any_model/train_module.py BasicTrainModule.__init__": _OPTIONS,
    "olm_train/extensions/any_model/train_module.py BasicTrainModule.load_state_dict": _TORCH,
    "olm_train/extensions/any_model/train_module.py BasicTrainModule.parts": _PARTS,
    "olm_train/extensions/any_model/train_module.py BasicTrainModule.state_dict": _TORCH,
    "olm_train/checkpoint/unsaved.py Unsaved.__init__": "a model and a loss of any kind",
    "olm_train/optim/given.py built": _OPTIONS,
    "olm_train/train_module.py TransformerTrainModule.load_state_dict": _TORCH,
    "olm_train/train_module.py TransformerTrainModule.state_dict": _TORCH,
    "olm_train/train_module_base.py TrainModule.load_state_dict": _TORCH,
    "olm_train/extensions/ladder/config.py LadderConfig.sizes": "options, as train.yaml has them",
    "olm_train/extensions/launch/config.py DstackConfig.resources": _SCHEDULER,
    "olm_train/extensions/launch/config.py K8sConfig.pod": _SCHEDULER,
    "olm_train/extensions/launch/config.py SkypilotConfig.file_mounts": _SCHEDULER,
    "olm_train/extensions/launch/config.py SkypilotConfig.resources": _SCHEDULER,
    "olm_train/extensions/harness/model.py Wishes.of": "generation_kwargs of lm_eval's tasks",
    "olm_train/train_module_base.py TrainModule.state_dict": _TORCH,
}


def untyped(annotation: ast.expr | None) -> bool:
    return annotation is not None and any(part in ast.unparse(annotation) for part in UNTYPED)


def public_names(body: list[ast.stmt], owner: str = "") -> Iterator[str]:
    """Public functions, methods and fields of ``body`` annotated with an untyped mapping."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_names(node.body, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.startswith("_") and node.name != "__init__":
                continue
            arguments = [
                a.annotation
                for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            ]
            if any(map(untyped, [*arguments, node.returns])):
                yield owner + node.name
        elif isinstance(node, ast.AnnAssign) and untyped(node.annotation):
            name = ast.unparse(node.target)
            if not name.startswith("_"):
                yield owner + name


@pytest.mark.parametrize("package", PACKAGES)
def test_no_public_name_is_an_untyped_mapping(package: str) -> None:
    found = {
        f"{path.relative_to(REPO)} {name}"
        for path in modules(package)
        for name in public_names(tree(path).body)
    }
    expected = {name for name in FREE if name.startswith(package + "/")}
    assert found == expected, "give it a type, or name it in FREE with the reason"


def test_the_search_finds_what_it_looks_for() -> None:
    field, hidden = "    x: dict[str, Any]", "    _z: dict[str, Any]"
    method = "    def f(self, y: Mapping[str, object]) -> None: ..."
    source = "\n".join(["class A:", field, method, hidden])
    assert list(public_names(ast.parse(source).body)) == ["A.x", "A.f"]


def test_what_may_be_free_exists() -> None:
    assert all((REPO / Path(name.split()[0])).exists() for name in FREE)
