"""Token files of other projects as a dataset, in place."""

COMMANDS = {
    "import": ("Other projects", "Make a dataset of token files, or a manifest of a mixture.")
}
