"""Proof that a dataset is what its digests say: `olm-data verify`."""

COMMANDS = {
    "verify": (
        "Look and prove",
        "Check a dataset or a lock byte by byte, or what a run trained on.",
    )
}
