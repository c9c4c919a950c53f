"""Rules over the names of buckets, prefixes and channels."""

from __future__ import annotations

import re
from collections.abc import Iterator

from chimera_sm.recipe.schema import LOCAL
from chimera_train.config.contract import CODE_CHANNEL

from .registry import Context, Said, plan_rule


@plan_rule("bucket_names", "env.bucket")
def bucket_names(context: Context) -> Iterator[Said]:
    """S3 guide: rules for naming general purpose buckets."""
    recipe = context.plan.recipe
    if recipe.target.name == LOCAL:
        return
    named = {
        "env.bucket": recipe.env.bucket,
        "checkpoint.s3_uri": _bucket(recipe.checkpoint.s3_uri),
        "data.uri": _bucket(recipe.data.uri) if recipe.data.location == "s3" else None,
    }
    for key, name in named.items():
        rule = None if name is None else bucket_problem(name)
        if rule:
            yield Said(
                f"{name!r} is no name of a bucket: {rule}",
                "s3://BUCKET/PREFIX" if key != "env.bucket" else "",
                where=key,
            )


def _bucket(uri: str | None) -> str | None:
    return None if uri is None else uri.removeprefix("s3://").split("/")[0]


def bucket_problem(name: str) -> str | None:
    """The rule that a bucket's name breaks.

    >>> bucket_problem("My_Bucket")
    'small letters, digits, dots and hyphens, a letter or digit at both ends'
    """
    if not 3 <= len(name) <= 63:
        return f"3 to 63 characters, and it has {len(name)}"
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*[a-z0-9]", name):
        return "small letters, digits, dots and hyphens, a letter or digit at both ends"
    if ".." in name:
        return "no two dots beside each other"
    if re.fullmatch(r"\d+(\.\d+){3}", name):
        return "no IP address"
    if name.startswith(("xn--", "sthree-")):
        return "not the beginnings xn-- and sthree-, which AWS keeps for itself"
    return None


@plan_rule("channel_name", "data.channel")
def channel_name(context: Context) -> Iterator[Said]:
    """A channel is a folder of the container and a variable's name (model: ChannelName, at most 64)."""
    channel = context.plan.recipe.data.channel
    if channel == CODE_CHANNEL:
        yield Said(f"{channel!r} is the channel of the code", "data.channel=train")
    elif not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", channel):
        yield Said(
            f"{channel!r} is no name of a channel: 1 to 64 letters, digits, hyphens and underscores",
            "data.channel=train",
        )


@plan_rule("checkpoint_prefix", "checkpoint.s3_uri", severity="warning")
def checkpoint_prefix(context: Context) -> Iterator[Said]:
    """One prefix a run: SageMaker restores all that it finds there."""
    recipe = context.plan.recipe
    uri = recipe.checkpoint.s3_uri
    if uri is None:
        return
    if recipe.target.name == LOCAL:
        yield Said("is ignored by target=local, which keeps checkpoints with the run", "checkpoint.s3_uri=null")
    elif recipe.checkpoint.storage == "shared":
        yield Said(
            "is ignored: checkpoint.storage=shared keeps checkpoints on the file system", "checkpoint.s3_uri=null"
        )
    elif "{run_id}" not in uri and not bucket_problem(_bucket(uri) or ""):
        # A shell takes the outer quotes, Hydra the inner ones.
        yield Said(
            f"{uri} has no {{run_id}}: every run would go on from the same checkpoints",
            f"""'checkpoint.s3_uri="{uri.rstrip("/")}/{{run_id}}"'""",
        )
