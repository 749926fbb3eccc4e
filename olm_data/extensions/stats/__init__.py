"""What is in a dataset, counted in bounded memory."""

COMMANDS = {"stats": ("Look and prove", "Count what is in a dataset.")}
