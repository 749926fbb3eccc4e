"""Traces of chosen steps, and what each was spent on."""
