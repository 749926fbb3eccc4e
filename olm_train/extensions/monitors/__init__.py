"""Looks into a model while it trains, and changes nothing there."""
