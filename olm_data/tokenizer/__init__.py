"""A tokenizer file: read with bounds, tried in a child, described for the manifest."""
