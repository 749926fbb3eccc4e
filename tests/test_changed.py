"""`make test-changed` chooses the test files that reach what changed, and leaves out others."""

from __future__ import annotations

import changed
import pytest
from support import sources

pytestmark = sources.together


GONE = "olm_data/gone.py"


@pytest.fixture(scope="module")
def graph() -> changed.Graph:
    return changed.Graph([GONE])


@pytest.mark.parametrize(
    ("name", "within", "without"),
    [
        # by an import, and by one of a support module
        (
            "olm_train/extensions/hf/attention.py",
            "olm_train/extensions/hf/test_families",
            "olm_data/order/test_schedule",
        ),
        ("olm_data/order/prp.py", "olm_data/order/test_schedule", "olm_data/run_log/test_log"),
        ("tests/support/hf_page.py", "docs/test_generated_pages", "olm_data/order/test_schedule"),
        # by the name of a command, a callback, a fixture
        (
            "olm_data/extensions/stats/command.py",
            "olm_data/extensions/stats/test_count",
            "olm_train/model/test_layers",
        ),
        (
            "olm_train/extensions/tracking/wandb.py",
            "olm_train/extensions/tracking/test_wandb",
            "olm_data/order/test_schedule",
        ),
        ("tests/support/s3.py", "olm_data/storage/test_s3", "olm_train/model/test_layers"),
        # pages, and what stands at the top
        (
            "docs/reference/hugging-face.md",
            "docs/test_generated_pages",
            "olm_data/order/test_schedule",
        ),
        ("pyproject.toml", "test_extensions", "olm_data/order/test_schedule"),
    ],
)
def test_what_reaches_a_change_is_chosen_and_nothing_far_from_it(
    graph: changed.Graph, name: str, within: str, without: str
) -> None:
    chosen = graph.reaching([name])
    print(f"{name}: {len(chosen)} of {len(graph.tests)} test files")
    assert f"tests/{within}.py" in chosen
    assert f"tests/{without}.py" in set(graph.tests) - chosen


@pytest.mark.parametrize("name", ["tests/conftest.py", "constraints.txt", "a-new-file"])
def test_what_concerns_all_tests_runs_all(graph: changed.Graph, name: str) -> None:
    assert graph.reaching([name]) == graph.tests


def test_a_changed_test_file_runs_with_those_that_name_it(graph: changed.Graph) -> None:
    alone = {"tests/olm_data/order/test_windowed.py"}
    assert graph.reaching(alone) == alone | {"tests/test_changed.py"}  # which names it


def test_tests_of_a_deleted_module_are_those_that_still_name_it(graph: changed.Graph) -> None:
    assert graph.reaching([GONE]) >= {"tests/test_changed.py"}
