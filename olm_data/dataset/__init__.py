"""The dataset on disk, format v1: shards, manifest, history."""
