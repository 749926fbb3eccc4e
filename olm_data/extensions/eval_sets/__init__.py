"""Downstream tasks as data: requests with their answers, in the ids of the training tokenizer."""

COMMANDS = {"eval-set": ("Evaluation", "Compile downstream tasks with the training tokenizer.")}
