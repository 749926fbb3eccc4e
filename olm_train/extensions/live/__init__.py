"""TODO."""

COMMANDS = {
    "watch": ("Commands", "Show runs in a browser while they train."),
}
