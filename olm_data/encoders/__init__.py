"""Encoders: plug-ins that turn text into token ids, and the gate that proves them equal."""
