"""`python -m olm_data`: the `olm-data` command line."""

from olm_data.cli import entry

entry()
