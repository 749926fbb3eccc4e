"""A scaling ladder: small runs that say, before a large one, what its loss will be."""
