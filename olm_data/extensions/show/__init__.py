"""Documents, rows and steps shown to people, decoded and with their origin: `olm-data show`."""

COMMANDS = {
    "show": (
        "Look and prove",
        "Show documents, rows and steps, and which steps see a document.",
    ),
}
