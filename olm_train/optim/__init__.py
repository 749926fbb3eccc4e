"""Optimisers, parameter groups and learning-rate schedules."""
