"""Files of text that are tables or whole documents: CSV and TSV, arrays of JSON, Arrow."""
