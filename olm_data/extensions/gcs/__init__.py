"""Google Cloud Storage, `gs://`."""
