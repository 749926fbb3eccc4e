"""`torchrun -m olm_train.generate`: `olm-train generate`, a process a rank."""

from olm_train.cli import main

if __name__ == "__main__":
    main("generate")
