"""Starts a run with a snapshot of its code, here or on a scheduler: `olm-train launch`."""

COMMANDS = {"launch": ("Commands", "Start a run here, or on Slurm, Kubernetes, SkyPilot, dstack.")}
