"""A run from a configuration file: its configuration, plan, checks, and the command."""
