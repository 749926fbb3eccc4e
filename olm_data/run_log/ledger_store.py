"""The loss ledger of a run whose save folder is remote: its files lie there too, under `ledger/`.

    <work_dir>/ledger/*.parquet --send, before each checkpoint--> <save folder>/ledger/
    <save folder>/ledger/ --fetch_ledger, at a resume--> <work_dir>/ledger/

So a run that goes on from a checkpoint on another machine has the ledger of all steps before. The
save folder is what counts: local files that it lacks, or has otherwise, are of a history that is
lost. Never: the pieces beyond a checkpoint; a resume removes those in both places.
"""

from __future__ import annotations

from pathlib import Path

from olm_data.run_log.ledger import LEDGER, MAX_FILE, is_ledger_name, keep_until, ledger_files
from olm_data.storage.disk import make_folder, write_durable
from olm_data.storage.store import Store


class LedgerSender:
    """Copies the files that one rank writes; those that the store refuses wait.

    Args:
        store: the save folder.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._sent: set[Path] = set()

    def send(self, written: list[Path]) -> None:
        """Return when all these files are in the store.

        Raises:
            StorageError: one is not; the next call tries again.
        """
        for path in written:
            if path not in self._sent:
                self._store.put(f"{LEDGER}/{path.name}", path.read_bytes())
                self._sent.add(path)


def fetch_ledger(store: Store, folder: Path, step: int | None) -> None:
    """Make the ledger of a folder that of the store, both up to a step.

    Args:
        store: the save folder.
        folder: of the run on this machine.
        step: of the checkpoint that the run goes on from; None: a new run, all go.

    Raises:
        ValidationError: a file is not one that a run writes.
        ResourceError, StorageError: the disk or the store refuses it.
    """
    there = {
        Path(entry.name).name: entry.size
        for entry in store.entries(LEDGER)
        if is_ledger_name(Path(entry.name).name)
    }
    if not there:  # the first start, or its ledger was never sent
        keep_until(folder, step)
        return
    local = {file.path.name: file.path for file in ledger_files(folder)}
    if step is not None:
        make_folder(str(folder / LEDGER))
        for name, path in local.items():
            if name not in there:
                path.unlink(missing_ok=True)
        for name in there:
            data = store.read(f"{LEDGER}/{name}", limit=MAX_FILE)
            if name not in local or local[name].read_bytes() != data:
                write_durable(folder / LEDGER / f"{name}.tmp-fetched", data)
                (folder / LEDGER / f"{name}.tmp-fetched").replace(folder / LEDGER / name)
    changed = keep_until(folder, step)
    kept = {file.path.name: file.path for file in ledger_files(folder)}
    for name in there:
        if name not in kept:
            store.delete(f"{LEDGER}/{name}")
        elif kept[name] in changed:
            store.put(f"{LEDGER}/{name}", kept[name].read_bytes())
