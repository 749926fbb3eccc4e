"""The log of a run, read while it grows: by pages, trackers and evaluations beside it."""
