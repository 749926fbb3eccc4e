"""SQLite databases: the rows of a table or a query."""
