"""Tries out a place as the output of a run, and cleans it up."""

COMMANDS = {
    "doctor": ("Storage", "Try out a folder or bucket as the output of a run; clean it up.")
}
