"""Runners: ways to run the tasks of a plan. See `base.Runner`."""
