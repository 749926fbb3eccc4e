"""Callbacks: what happens around the steps of the training loop, one file each."""
