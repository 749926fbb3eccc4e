"""Datasets written as files of other projects, one file a format behind `base.Writer`."""

COMMANDS = {"export": ("Other projects", "Write a dataset as files of another project.")}
