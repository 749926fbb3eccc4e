"""A byte-level BPE tokenizer of one's own text: `olm-data train-tokenizer`."""

COMMANDS = {"train-tokenizer": ("Text to tokens", "Train a byte-level BPE tokenizer on your text.")}
