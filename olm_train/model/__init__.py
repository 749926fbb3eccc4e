"""The decoder, its attention back-ends, its initialisation and its named sizes."""
