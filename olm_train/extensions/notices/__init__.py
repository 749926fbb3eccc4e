"""What a run tells people who are not looking at it: events, and how they reach a webhook."""
