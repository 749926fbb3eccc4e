"""Train decoder language models on rows of an `olm_data` mixture lock.

Importing this package imports nothing else: torch is loaded by the module that needs it, so that
configuration errors and help are shown at once.
"""
