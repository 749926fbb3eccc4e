"""The fork server: a forked process that has inherited one starts its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FORKS = """
import os, sys, traceback
import olm_data
source, output, tokenizer = sys.argv[1:]

def tokenize(name):
    olm_data.tokenize(source, output=output + name, tokenizer=tokenizer, workers=2)

tokenize("-parent")
child = os.fork()
if not child:
    try:
        tokenize("-child")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_tokenizes_after_its_parent_did(
    tmp_path: Path, tiny_tokenizer: Path
) -> None:
    source = tmp_path / "in.txt"
    source.write_text("some words\n" * 50)
    output = tmp_path / "out"
    words = [sys.executable, "-c", FORKS, str(source), str(output), str(tiny_tokenizer)]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "out-parent" / "manifest.json").read_text()
    assert (tmp_path / "out-child" / "manifest.json").read_text()
