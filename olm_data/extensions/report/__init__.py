"""Self-contained HTML pages about a mixture lock, and about a run of it."""
