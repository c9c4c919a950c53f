"""Puts a code bundle where its content says, once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from chimera_sm.aws.bundle import Bundle
from chimera_sm.aws.session import Session, aws_errors


def split_uri(uri: str) -> tuple[str, str]:
    """`s3://bucket/a/b` → ("bucket", "a/b")."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key


def upload_bundle(
    session: Session, bundle: Bundle, uri: str, *, kms_key_id: str | None = None, account_id: str | None = None
) -> int:
    """Upload what is not there yet under `uri` (which ends in the bundle's hash and a slash). Returns the number of
    objects written. `account_id` refuses a bucket that someone else owns."""
    bucket, prefix = split_uri(uri)
    s3 = session.client("s3")
    owner = {"ExpectedBucketOwner": account_id} if account_id else {}
    encryption = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": kms_key_id} if kms_key_id else {}

    def put(item: tuple[str, bytes]) -> None:
        s3.put_object(Bucket=bucket, Key=f"{prefix}{item[0]}", Body=item[1], **encryption, **owner)

    with aws_errors(f"upload the code bundle to {uri}"):
        there = _sizes(s3, bucket, prefix, owner)
        missing = [(path, content) for path, content in bundle.files.items() if there.get(path) != len(content)]
        with ThreadPoolExecutor(max_workers=8) as pool:
            list(pool.map(put, missing))
    return len(missing)


def _sizes(s3: Any, bucket: str, prefix: str, owner: dict[str, str]) -> dict[str, int]:
    """Path below `prefix` → size in bytes."""
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix, **owner)
    return {entry["Key"].removeprefix(prefix): entry["Size"] for page in pages for entry in page.get("Contents", ())}
