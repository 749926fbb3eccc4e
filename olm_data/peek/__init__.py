"""Documents and rows shown to people."""
