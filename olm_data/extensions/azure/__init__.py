"""Azure Blob Storage, `az://` and `abfs://`."""
