"""Means of weights: of the last steps, exponential, and of several checkpoints."""

COMMANDS = {
    "merge": ("Commands", "Write the mean of the weights of several checkpoints."),
}
