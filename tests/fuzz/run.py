"""Fuzzes one parser, guided by coverage: python tests/fuzz/run.py TARGET [--seconds 60].

Needs atheris. What it finds ends the run: libFuzzer writes the bytes to `crash-...` in the current
folder. Without a target, prints their names. Findings become tests.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def main() -> None:
    """Instrument both packages, make the seeds, fuzz."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", nargs="?")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--tokenizer", type=Path, help="a small tokenizer.json of your own")
    options = parser.parse_args()
    import atheris

    with atheris.instrument_imports(include=["olm_data", "olm_train"]):
        from fuzz.targets import Workshop
    from support.small_tokenizer import train

    folder = Path(
        tempfile.mkdtemp(prefix="olm-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    )
    tokenizer = options.tokenizer or train(folder / "tokenizer.json")
    targets = Workshop(folder, tokenizer).targets
    if options.target not in targets:
        print("\n".join(targets))
        return
    target = targets[options.target]
    corpus = folder / "corpus"
    corpus.mkdir()
    for number, seed in enumerate(target.seeds):
        (corpus / str(number)).write_bytes(seed)
    words = ["-rss_limit_mb=4096", "-timeout=20", f"-max_total_time={options.seconds}"]
    atheris.Setup([sys.argv[0], str(corpus), "-max_len=20000", *words], target.run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
