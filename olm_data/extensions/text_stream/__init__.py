"""Text as windows of tokens without shards: read, encoded and cut while it is asked for."""
