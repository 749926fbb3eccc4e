"""`torchrun -m olm_train.run`: `olm-train run`, a process a rank. See `command.py`."""

from olm_train.cli import main

if __name__ == "__main__":
    main("run")
