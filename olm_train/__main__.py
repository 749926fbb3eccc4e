"""`python -m olm_train`: the `olm-train` command line."""

from olm_train.cli import main

main()
