"""The contestants of `speedrun.py`, what they read, and how their time is taken."""
