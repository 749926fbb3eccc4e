"""`--decontaminate` drops what shares n words in a row with evaluation texts, and nothing else."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.adding import Stop, add_to
from support.inline_runner import InlineRunner
from support.project import Project
from support.tokenizing import digests, make_request, tokenized

from olm_data.dataset.eval_set import Primary
from olm_data.errors import ConflictError, InputError, UsageError, ValidationError
from olm_data.extensions.eval_sets.tasks import Continuation, Question, Task, build
from olm_data.extensions.verify.datasets import verify
from olm_data.runners.local import LocalRunner
from olm_data.tokenization import decontaminate
from olm_data.tokenization.decontaminate import EvalTexts, read_texts
from olm_data.tokenization.stored_job import load_job
from olm_data.tokenizer.tokenizer import load_tokenizer

QUESTION = "which of these planets is the closest to the sun and has no moon of its own"
words = st.lists(st.sampled_from(["a", "b", "Cc"]), max_size=12)


@given(texts=st.lists(words, max_size=4), document=words, n=st.integers(2, 5))
@pytest.mark.parametrize("hashing", [True, False])
def test_a_document_is_found_where_n_words_in_a_row_are_the_same_and_only_there(
    texts: list[list[str]], document: list[str], n: int, hashing: bool
) -> None:
    """Against a comparison of all windows; without hashing every window is a collision."""
    with pytest.MonkeyPatch.context() as patch:
        if not hashing:
            patch.setattr(
                decontaminate,
                "window_hashes",
                lambda values, n: np.zeros(len(values) - n + 1, np.uint64),
            )
        found = EvalTexts.of((" ".join(text) for text in texts), n)

        def windows(text: list[str]) -> set[tuple[str, ...]]:
            lower = [word.lower() for word in text]
            return {tuple(lower[k : k + n]) for k in range(len(lower) - n + 1)}

        expected = any(windows(text) & windows(document) for text in texts)
        assert found.shares(", ".join(document).upper() + ".") == expected
        found.self_test()


def test_what_the_self_test_plants_must_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = EvalTexts.of(iter([QUESTION, "too short"]), 13)
    said = texts.self_test()
    assert said.endswith("1 planted in a self-test were found")
    assert "13 words in a row of 2 evaluation texts, 1 of them shorter" in said
    for wrong in (False, True):
        monkeypatch.setattr(EvalTexts, "shares", lambda *_, wrong=wrong: wrong)
        with pytest.raises(ValidationError, match="self-test of --decontaminate failed"):
            texts.self_test()


class Stopping(InlineRunner):
    """Stops after its first task."""

    def run(self, job: Any, tasks: Any, total: int, **callbacks: Any) -> None:
        super().run(job, list(tasks)[:1], total, **callbacks)
        raise Stop


def test_documents_are_dropped_counted_and_listed_whoever_runs_the_tasks(project: Project) -> None:
    texts = [f"document {n} about nothing that anybody would ask for" for n in range(60)]
    for n in (3, 41):
        texts[n] += ": " + QUESTION.upper().replace(" ", ",\n") + "?"
    texts[50] += " ".join(QUESTION.split()[:12])  # one word less than it takes
    inputs = [project.write("a.jsonl", [*texts, texts[3]])]
    (project / "evals").mkdir()
    (project / "evals" / "quiz.jsonl").write_text(
        json.dumps({"id": 3, "question": QUESTION, "choices": [{"text": "Mercury"}]}) + "\n\n"
    )
    (project / "evals" / "short.txt").write_text("too short\nto be found\n")
    options: dict[str, Any] = {
        "decontaminate": [str(project / "evals")],
        "id_column": "id",
        "shard_tokens": 200,
        "dedup": "exact",
    }
    request = make_request(inputs, project.tokenizer, str(project / "none"), **options)
    assert request.evaluated.data.count(b"\n") == 2
    log = io.StringIO()
    made = project.make(inputs, "whole", log=log, **options)
    assert "1 of them shorter and so never found; 1 planted in a self-test" in log.getvalue()
    assert made.manifest.dropped == {"contaminated": 2, "duplicate": 1}
    kept = project.open("whole")
    assert [kept.document(n).id for n in range(kept.documents)] == [
        f"a-{n}" for n in range(60) if n not in (3, 41)
    ]
    listed = sorted((project / "whole" / "contaminated").iterdir())
    assert "".join(path.read_text() for path in listed) == "a-3\na-41\n"
    assert tokenized(made).decontaminate == (request.evaluated.sha256, 13)
    assert verify(str(project / "whole")).ok
    expected = digests(project / "whole")
    project.make(inputs, "two", runner=LocalRunner(2), **options)
    assert digests(project / "two") == expected
    # a run that was stopped goes on with the same texts alone
    out = project / "stopped"
    with pytest.raises(Stop):
        project.make(inputs, out, runner=Stopping(), **options | {"dedup": None})
    (out / "evaluation-texts.txt").write_text(QUESTION)
    with pytest.raises(ValidationError, match="evaluation texts are missing or damaged"):
        _ = load_job(str(out)).evaluated
    for other in ({"decontaminate_ngram": 12}, {"decontaminate": [str(inputs[0])]}):
        with pytest.raises(ConflictError, match="decontaminate"):
            project.make(inputs, out, **options | {"dedup": None} | other)
    # what is added is compared with the texts of the dataset
    more = project.write("b.jsonl", ["a new one", f"another: {QUESTION}"])
    assert add_to(project / "two", more).manifest.dropped["contaminated"] == 3


def test_eval_sets_are_read_as_the_text_of_their_requests(project: Project) -> None:
    spec, folder = load_tokenizer(project.tokenizer), str(project / "set")
    choices = [Continuation(QUESTION, " mercury"), Continuation(QUESTION, " venus")]
    build(Task("quiz", Primary.acc, [Question(choices, 0)], "", "", ""), spec, folder)
    found = read_texts([folder], 13, spec)
    assert found.data.decode().splitlines() == [f"{QUESTION} mercury", f"{QUESTION} venus"]
    other = project / "other.json"
    other.write_text(project.tokenizer.read_text() + "\n")
    with pytest.raises(InputError, match="built with another tokenizer"):
        read_texts([folder], 13, load_tokenizer(other))


def test_conversations_are_compared_by_what_is_said(tmp_path: Path) -> None:
    said = json.dumps({"messages": [{"role": "user", "content": QUESTION.replace(" ", "\n")}]})
    texts = EvalTexts.of(iter([QUESTION]), 13)
    assert not texts.shares(said)
    assert texts.shares(" ".join(decontaminate._strings(json.loads(said))))


@pytest.mark.parametrize(
    ("name", "content", "error", "says"),
    [
        ("a.jsonl", b'{"a": "b"}\n{"a": \n', InputError, r"a.jsonl, line 2"),
        ("a.txt", b"\xff\xfe", InputError, "cannot be read"),
        ("a.txt", b"few words", InputError, "no evaluation text has 13 words"),
        ("a.csv", b"text\na", UsageError, "evaluation texts are text files"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    name: str, content: bytes, error: type[Exception], says: str, project: Project
) -> None:
    (project / name).write_bytes(content)
    with pytest.raises(error, match=says):
        read_texts([str(project / name)], 13, load_tokenizer(project.tokenizer))
