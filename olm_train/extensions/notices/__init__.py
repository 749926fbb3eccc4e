"""What a run tells people who are not looking at it: events, and how they reach a webhook."""

COMMANDS = {
    "notify": ("Commands", "Tell a webhook when a run is gone without a word."),
}
