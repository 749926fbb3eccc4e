"""`torchrun -m olm_train.generate`, see `command.py`."""

from __future__ import annotations

from olm_data.sinks import guard
from olm_train.generate.command import main

if __name__ == "__main__":
    guard()
    main(prog_name="olm-train generate")
