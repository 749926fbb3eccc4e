"""Looks into a model and its ranks while it trains, and changes nothing there."""
