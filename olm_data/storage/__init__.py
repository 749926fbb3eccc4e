"""Where bytes go and come from: local folders, S3, the hub; faults are survived here."""
