"""Time travel: what a step saw, and which steps see a document."""
