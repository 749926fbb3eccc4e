"""What each preset takes to train: `olm-train presets`."""

COMMANDS = {"presets": ("Commands", "Say what GPUs and options each preset takes.")}
