"""Shuffles that `shuffle_quality.py` compares, and the statistics it applies to them."""
