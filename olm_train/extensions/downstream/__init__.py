"""TODO."""

COMMANDS = {
    "evaluate": ("Commands", "Print loss, bits per byte and scores of tasks of a model."),
}
