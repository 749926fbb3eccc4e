"""Checkpoints: tensors by torch's distributed checkpoint, everything else as JSON, digests last."""
