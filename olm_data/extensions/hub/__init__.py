"""Datasets and models to repositories of the hub, and back."""
