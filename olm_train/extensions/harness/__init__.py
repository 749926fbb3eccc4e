"""The tasks of lm-evaluation-harness on a checkpoint as it lies, without an export."""

COMMANDS = {
    "lm-eval": ("Commands", "Run tasks of lm-evaluation-harness on a checkpoint."),
}
