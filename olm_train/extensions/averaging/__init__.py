"""TODO."""

COMMANDS = {
    "merge": ("Commands", "Write the mean of the weights of several checkpoints."),
}
