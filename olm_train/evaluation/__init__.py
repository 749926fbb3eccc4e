"""Measures of a model on data it is not trained on, in a run and without one, by one engine."""
