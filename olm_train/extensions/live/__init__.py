"""Runs in a browser while they train: `olm-train watch`."""

COMMANDS = {
    "watch": ("Commands", "Show runs in a browser while they train."),
}
