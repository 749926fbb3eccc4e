"""Parts that not every run needs. Each enters by its entry points in pyproject.toml; delete a
folder with its lines there, and everything else goes on.
"""
