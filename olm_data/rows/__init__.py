"""Rows of a mixture as arrays: the torch-free half of the loader."""
