"""Which records a user wants: expressions, ids, draws, limits. Values in, masks out."""
