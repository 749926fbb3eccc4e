"""Ranks that a scheduler starts, without torchrun: the one that fails says why, whichever it is."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.forked import python
from support.ports import free_port
from support.runs import environment, write_config

OWN = """
from dataclasses import dataclass
from olm_data.errors import InputError
from olm_train import Callback

@dataclass(kw_only=True)
class Fails(Callback):
    enabled: bool = True
    rank: int

    def post_step(self):
        if self.trainer.world.rank == self.rank:
            raise InputError(f"rank {self.rank} has had enough")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "met"), [(0, True), (1, True), (1, False)])
def test_an_error_of_any_rank_is_printed_once(
    tiny_mixture: Path, tmp_path: Path, rank: int, met: bool
) -> None:
    (tmp_path / "own_rank.py").write_text(OWN)
    config = write_config(tmp_path / "train.yaml", tiny_mixture, tmp_path / "run")
    option = f"--trainer.callbacks.boom={{name: 'own_rank:Fails', rank: {rank}}}"
    wrong = "--data_loader.mixture=none.lock.json"
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    paths = environment()
    paths["PYTHONPATH"] = f"{tmp_path}:{paths.get('PYTHONPATH', '')}"
    ranks = [
        subprocess.Popen(
            [python(), "-m", "olm_train.run", str(config), option]
            + ([] if met or number != rank else [wrong]),
            env=paths | address | {"RANK": str(number)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    said = ["", ""]
    said[rank] = ranks[rank].communicate(timeout=1200)[1]
    if not met:
        ranks[1 - rank].kill()  # it waits for the other one
    said[1 - rank] = ranks[1 - rank].communicate(timeout=1200)[1]
    assert ranks[rank].returncode != 0
    what = f"error: rank {rank} has had enough" if met else "none.lock.json"
    assert said[rank].count(what) == 1, said
    assert what not in said[1 - rank]
