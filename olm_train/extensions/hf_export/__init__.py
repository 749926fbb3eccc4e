"""A checkpoint as a folder that other programs read, streamed out and proved before it is there."""

COMMANDS = {
    "export": ("Commands", "Write the weights of a checkpoint for other programs, or as one file."),
}
