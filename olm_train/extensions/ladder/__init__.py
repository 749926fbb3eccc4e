"""A scaling ladder: small runs that say, before a large one, what its loss will be."""

COMMANDS = {"ladder": ("Commands", "Say from small runs what the loss of a large one will be.")}
