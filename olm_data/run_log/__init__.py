"""What a run writes about itself, line by line, and the names of what it measures."""
