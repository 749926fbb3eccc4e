"""Downstream tasks as data: requests with their answers, in the ids of the training tokenizer."""
