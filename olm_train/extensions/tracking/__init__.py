"""Trackers: replicas of a run's log on W&B, Comet, TensorBoard and trackio."""

COMMANDS = {
    "track": ("Commands", "Show a run on a tracker: W&B, Comet, TensorBoard, trackio."),
}
