"""Self-contained HTML pages about a mixture lock, and about a run of it."""

COMMANDS = {
    "report": ("Look and prove", "Write one HTML page about a mixture and runs of it."),
}
