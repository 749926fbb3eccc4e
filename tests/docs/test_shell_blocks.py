"""Every block that README.md and docs/ tell a reader to run is run, as typed, page by page.

What cannot run here is marked in the page (see support.pages) and is a test case of its own below:
`pytest tests/docs -v -k not_run` lists and counts these blocks with their reasons.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.page_run import PageRun, run_page
from support.pages import RUN, SHELL, Block, Page, pages, printed, read_page
from support.typed import mistakes

from olm_data.config import strict_yaml

CLUSTERS = ("slurm", "ray")
REASONS = (
    "needs a GPU",
    "needs a cluster",
    "needs the network",
    "installs packages",
    "an excerpt",
    "a server that goes on until Ctrl-C",
)
"""What may stand after `not run:`, with more words behind it."""


def group(page: Page) -> str:
    """Tests of a page share one run of it; those with a cluster share the cluster with others."""
    return next((name for name in CLUSTERS if name in page.given), page.name)


def cases(blocks: Iterator[Block]) -> list[Any]:
    return [
        pytest.param(block, id=f"{block} {block.not_run or block.language}") for block in blocks
    ]


RUNNING = [page for page in pages() if any(block.runs for block in page.blocks)]
ALL = [block for page in pages() for block in page.blocks]


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [pytest.param(p, id=p.name, marks=pytest.mark.xdist_group(group(p))) for p in RUNNING]
)
def test_the_page_works_as_typed_and_prints_what_it_shows(
    page: Page, ran: Callable[[str], PageRun]
) -> None:
    run = ran(page.name)
    for block, said in run.said.items():
        missing = printed(block, said)
        assert missing is None, f"{block} did not print {missing!r} in its place:\n{said}"


@pytest.mark.parametrize(
    "block", cases(b for b in ALL if b.language in RUN and b.not_run is not None)
)
def test_a_block_that_is_not_run_says_why_and_its_commands_parse(block: Block) -> None:
    assert (block.not_run or "").startswith(REASONS), f"{block}: {block.not_run}"
    if block.language == "python":
        compile(block.text, str(block), "exec")
    else:
        assert mistakes(block.text) == []


def test_most_shell_blocks_are_run() -> None:
    shell = [block for block in ALL if block.language in SHELL]
    not_run = [block for block in shell if not block.runs]
    assert len(shell) > 20
    assert len(not_run) <= len(shell) / 3, [str(block) for block in not_run]


@pytest.mark.parametrize("block", cases(b for b in ALL if b.language in ("json", "yaml")))
def test_values_shown_in_a_page_are_json_and_strict_yaml(block: Block) -> None:
    if block.language == "json":
        json.loads(block.text)
    else:
        strict_yaml.load(block.text.encode(), str(block), numbers="float")


def test_no_command_hides_in_a_block_without_a_language(given_names: set[str]) -> None:
    for page in pages():
        assert set(page.given) <= given_names, page.name
        if page.name.startswith("docs/reference/"):
            continue  # there such blocks are synopses, not commands
        for block in page.blocks:
            starts = re.search(
                r"^(olm-data|torchrun|python|pip|make|s(run|batch)) ", block.text, re.M
            )
            assert block.language or not starts, f"{block}: mark it bash"
            assert block.language not in ("shell", "zsh", "py"), f"{block}: bash, or python"


# --- the harness itself ------------------------------------------------------------------------

PAGE = """\
<!-- given: nothing -->
```bash
name=world
```

<!-- not run: needs a GPU -->
```bash
exit 1
```

```console
$ echo "hello $name"
hello world
```

```python
print("one\\ntwo\\nthree")
```

```text
one
...
th...ee
```

1. In a list:

   ```bash
   if true; then
     echo "  indented"
   fi
   ```
"""


def page_of(text: str, tmp_path: Path) -> Page:
    path = tmp_path / "page.md"
    path.write_text(text)
    return read_page("page.md", path)


def test_blocks_share_a_shell_and_marked_ones_do_not_run(tmp_path: Path) -> None:
    page = page_of(PAGE, tmp_path)
    assert page.given == ("nothing",)
    assert [block.line for block in page.blocks] == [3, 8, 12, 17, 29]
    (tmp_path / "here").mkdir()
    said = run_page(page, tmp_path / "here", {}).said
    assert [printed(block, text) for block, text in said.items()] == [None] * 4
    assert list(said.values())[1:] == ["hello world\n", "one\ntwo\nthree\n", "  indented\n"]


def test_what_is_not_printed_or_in_another_order_is_found(tmp_path: Path) -> None:
    *_, block, _ = page_of(PAGE, tmp_path).blocks
    assert printed(block, "one\nthree") is None
    assert printed(block, "three\none") == "th...ee"
    assert printed(block, "one\nth\nee") == "th...ee"  # ... does not reach over a line's end


def test_a_block_that_fails_is_named(tmp_path: Path) -> None:
    page = page_of("```bash\ntrue\n```\n\n```bash\necho oh; false | true\n```\n", tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(AssertionError, match=r"page.md:6 failed:\noh"):
        run_page(page, tmp_path / "here", {})


@pytest.mark.parametrize(
    ("script", "wrong"),
    [
        ("olm-data verify tokens --sample 1%", None),
        ("olm-data --debug verify", "without target"),
        ("olm-data verify tokens --smaple 1%", "No such option"),
        ("olm-data tokenize x --workers none", "not a valid integer"),
        ("olm-data tokenise x", "no command tokenise"),
        ("true && srun torchrun --nproc-per-node=8 \\\n -m olm_train.run a.yaml --seed=1", None),
        ("torchrun --nproc=8 --no-such -m olm_train.run a.yaml", "torchrun does not take"),
        ("python -m olm_train.run a.yaml --trainer.hard_stop='{value: 9, unit: steps}'", None),
        ("python -m olm_train.run a.yaml --trainer.hard_stap.value=9", "no field"),
        ("python -m olm_train.run a.yaml --seed", "--seed has no value"),
        ("olm-train generate runs/x --top_k 3", "No such option"),
        ("cat > j.sbatch <<'E'\nsrun olm-data doctor --dry tokens\nE\n", "No such option"),
        ("pip install -e '.[train,slow]'", "no extra slow"),
        ("make demos", "no target demos"),
        ("if true; then", "syntax error"),
    ],
)
def test_mistakes_in_commands_that_are_not_run_are_found(script: str, wrong: str | None) -> None:
    found = mistakes(script)
    assert (not found) if wrong is None else (len(found) == 1 and wrong in found[0]), found
