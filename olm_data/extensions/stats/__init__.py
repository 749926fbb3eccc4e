"""What is in a dataset, counted in bounded memory."""
