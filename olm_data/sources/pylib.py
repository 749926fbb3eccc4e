"""Text that is on every machine with Python: the library's source and the packages' documents.

    stdlib    *.py of the standard library, without its tests
    packages  METADATA, README, LICENSE and documentation texts of the installed distributions

Each file is one document; its id is its path below the library. Equal texts (the licences!) are
taken once, so that a held-out document is not also a training document.
"""

from __future__ import annotations

import os
import re
import sysconfig
from hashlib import sha256
from pathlib import Path

from olm_data.dataset.inputs import InputFile
from olm_data.errors import InputError, UsageError, suggest
from olm_data.sources.files import local_revision
from olm_data.sources.listing import Listing
from olm_data.sources.passed import SkippedFile

SUBSETS = ("stdlib", "packages")
MOST_BYTES = 1_000_000  # larger "documents" are data
LEAST_BYTES = 64  # shorter ones say nothing

_NOT_SOURCE = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_DOCUMENT = re.compile(
    r"^(METADATA|PKG-INFO|(README|LICEN[CS]E|COPYING|NOTICE|AUTHORS|CHANGELOG|CHANGES|HISTORY)[^/]*"
    r"|[^/]+\.(rst|md|txt))$",
    re.IGNORECASE,
)
_DATA = {"top_level.txt", "entry_points.txt", "sources.txt", "requires.txt", "dependency_links.txt"}
_CODE = (".py", ".pyc", ".pyi", ".so", ".json", ".html", ".gz", ".zip", ".c", ".h", ".js", ".css")


def list_inputs(subset: str) -> Listing:
    """Return the files of a subset as text inputs, sorted by their path below the library.

    Raises:
        UsageError: no such subset.
        InputError: this Python has no such files.
    """
    if subset not in SUBSETS:
        raise UsageError(
            f"the source pylib has no subset {subset!r}",
            where=f"--subset {subset}",
            fix=suggest(subset, SUBSETS),
        )
    root = Path(sysconfig.get_paths()["stdlib" if subset == "stdlib" else "purelib"])
    inputs: list[InputFile] = []
    passed: list[SkippedFile] = []
    seen: set[bytes] = set()
    for name in _walk(root, documents=subset == "packages"):
        path = root / name
        size = path.stat().st_size
        if not LEAST_BYTES <= size <= MOST_BYTES:
            passed.append(SkippedFile(name, "size"))
            continue
        content = sha256(path.read_bytes()).digest()
        if content in seen:
            passed.append(SkippedFile(name, "copy"))
            continue
        seen.add(content)
        inputs.append(
            InputFile(
                path=f"pylib:{name}",
                url=str(path),
                bytes=size,
                revision=local_revision(str(path)),
                format="txt",
                position="byte",
            )
        )
    if not inputs:
        raise InputError(f"this Python has no files of pylib {subset}", where=f"--subset {subset}")
    return Listing(tuple(inputs), tuple(passed))


def _walk(root: Path, *, documents: bool) -> list[str]:
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_SOURCE]
        below = Path(folder).relative_to(root)
        for name in files:
            if _is_document(name) if documents else name.endswith(".py"):
                names.append((below / name).as_posix())
    return sorted(names)


def _is_document(name: str) -> bool:
    lower = name.lower()
    return bool(_DOCUMENT.match(name)) and lower not in _DATA and not lower.endswith(_CODE)
