"""Trackers: replicas of a run's log on W&B, Comet, TensorBoard and trackio."""
