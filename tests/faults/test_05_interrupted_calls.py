"""Row 5: EIO fails the task and lists nothing; short writes and interrupted calls go on."""

from __future__ import annotations

from pathlib import Path

from support.command import program
from support.tokenizing import digests, texts, write_jsonl

SCRIPT = """
import signal, sys
from pathlib import Path
from support.tokenizing import make_dataset

source, tokenizer, quiet, noisy = map(Path, sys.argv[1:])
make_dataset([source], tokenizer, quiet, shard_tokens=500, max_bad="100%")
seen = 0

def handler(number, frame):
    global seen
    seen += 1

signal.signal(signal.SIGALRM, handler)
signal.siginterrupt(signal.SIGALRM, True)  # system calls are cut off, not restarted by the kernel
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
make_dataset([source], tokenizer, noisy, shard_tokens=500, max_bad="100%")
signal.setitimer(signal.ITIMER_REAL, 0)
print(seen)
"""


def test_05_system_calls_interrupted_all_the_time_change_no_byte(
    tiny_tokenizer: Path, tmp_path: Path
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [*texts(60), b"bad", *texts(60, 60)])
    done = program("-c", SCRIPT, source, tiny_tokenizer, tmp_path / "quiet", tmp_path / "noisy")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10
    assert digests(tmp_path / "quiet") == digests(tmp_path / "noisy")
