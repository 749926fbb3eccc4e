"""The bucket that a URL names.

s3://                                             -> s3.S3Bucket, by AWS's own client
gs:// az:// abfs:// memory:// http(s):// hf://    -> cloud.CloudBucket, by fsspec
"""

from __future__ import annotations

from olm_data.errors import UsageError, refuse_secrets
from olm_data.storage.bucket import Bucket
from olm_data.storage.objects import SCHEMES, scheme_of, split_url


def open_bucket(url: str, *, hasty: bool = False) -> tuple[Bucket, str]:
    """Return the bucket of a URL, and the key in it. Nothing is asked of the store yet.

    Raises:
        UsageError: the URL holds credentials, names no bucket, or is of an unknown scheme.
    """
    refuse_secrets(url)
    scheme = scheme_of(url)
    if scheme not in SCHEMES:
        raise UsageError(
            f"storage at {scheme}:// is not supported",
            fix=f"use a local path or one of {', '.join(f'{name}://' for name in SCHEMES)}",
        )
    name, key = split_url(url)
    if scheme == "s3":
        from olm_data.storage.s3 import S3Bucket

        return S3Bucket(name, hasty=hasty), key
    from olm_data.storage.cloud import CloudBucket

    return CloudBucket(scheme, name, hasty=hasty), key
