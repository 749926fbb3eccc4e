"""Processes, meshes and the one function that spreads a model over them."""
