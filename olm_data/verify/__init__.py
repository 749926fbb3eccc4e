"""Proof that a dataset is what its digests say."""
