"""A run from a model, an optimiser and data: how ranks share the weights is chosen, and said."""
