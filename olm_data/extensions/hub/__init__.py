"""Datasets and models to repositories of the hub, and back."""

COMMANDS = {
    "push": ("Other projects", "Send a dataset to a repository of the Hugging Face hub."),
    "pull": ("Other projects", "Fetch a dataset from the Hugging Face hub, and verify it."),
}
