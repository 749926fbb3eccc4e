"""Tasks on a Ray cluster."""
