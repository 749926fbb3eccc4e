"""Scores of downstream tasks, in a run and of a trained model: `olm-train evaluate`."""

COMMANDS = {
    "evaluate": ("Commands", "Print loss, bits per byte and scores of tasks of a model."),
}
