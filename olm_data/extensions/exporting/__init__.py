"""Datasets written as files of other projects, one file a format behind `base.Writer`."""
