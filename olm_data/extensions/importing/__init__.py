"""Token files of other projects as a dataset, in place."""
