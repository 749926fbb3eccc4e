"""Comparing what a mixture planned with what a run trained on."""
