"""FAULTS row 13: an output that cannot be written is refused before any text is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.inline_runner import Never
from support.tokenizing import make_dataset, texts, write_jsonl

from olm_data.errors import ResourceError


@pytest.mark.parametrize("output", ["file/out", "file", "/proc/out", "/sys/out"])
def test_13_an_output_that_cannot_be_a_folder_is_refused_at_once(
    output: str, tiny_tokenizer: Path, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(5))
    (tmp_path / "file").write_text("a file")
    with pytest.raises(ResourceError) as caught:
        make_dataset([source], tiny_tokenizer, tmp_path / output, runner=Never())
    assert output in str(caught.value.where)
    assert caught.value.fix


def test_13_a_folder_without_permission_is_refused_at_once(
    tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # nobody may not start root's interpreter, which tries the tokenizer out
    monkeypatch.setattr("olm_data.tokenizer.tokenizer.probe", lambda *_: None)
    source = write_jsonl(tmp_path / "a.jsonl", texts(5))
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0o555)
    pid = os.fork()  # root may write anywhere, so the attempt is made as nobody
    if pid == 0:
        code = 1
        try:
            for parent in [tmp_path, *tmp_path.parents]:
                if parent.stat().st_uid == os.getuid() and parent.name.startswith("pytest-of"):
                    parent.chmod(0o755)
            os.chmod(tiny_tokenizer.parent, 0o755)
            for parent in tmp_path.parents[:2]:
                os.chmod(parent, 0o755)
            os.chmod(tmp_path, 0o755)
            if os.getuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            make_dataset([source], tiny_tokenizer, closed / "out", runner=Never())
        except ResourceError as error:
            code = 5 if "not allowed" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
