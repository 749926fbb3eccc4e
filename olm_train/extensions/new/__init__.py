"""A folder to train in, written for a text and a machine: `olm-train new`."""

COMMANDS = {"new": ("Commands", "Write a folder with a mixture and configuration for your text.")}
