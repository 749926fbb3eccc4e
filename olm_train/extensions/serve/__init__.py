"""A server that answers as OpenAI's API does, for trying a model out."""

COMMANDS = {
    "serve": ("Commands", "Answer on loopback as OpenAI's API does, for trying a model out."),
}
