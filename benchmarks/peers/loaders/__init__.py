"""Loaders that `bench_loader.py --peers` measures: one file a project, each in its environment."""
