"""Other projects' own readers of what `olm-data export` writes; see check_exports.py."""
