"""PDF files: the text that their pages hold."""
