"""What of a whole recipe lasts as long as its run: the trainer's list, and keys that only the launching side has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from chimera_train.config import Problem
from chimera_train.config import lasting as trainer

_DATA = "the data are those of the launch"
_CODE = "the code stays the one that was launched"
_PLACE = "the checkpoints of the run are there"

LASTING = {
    **trainer.LASTING,
    "data.location": _DATA,
    "data.uri": _DATA,
    "data.input_mode": _DATA,
    "data.vocab_size": _DATA,
    "checkpoint.s3_uri": _PLACE,
    "target.name": _PLACE,
    "env.region": _PLACE,
    "env.account_id": _PLACE,
    "env.bucket": _PLACE,
    "env.fsx_file_system_id": _PLACE,
    "env.fsx_mount_name": _PLACE,
    "code": _CODE,
}
"""Key, or section of which no key may change → why."""

CHANGEABLE = frozenset(
    {
        *trainer.CHANGEABLE,
        "description",
        "data.size_gb",
        "data.region",
        *(f"instances.{name}" for name in ("name", "type", "count", "fallbacks", "workers_per_host", "volume_gb")),
        *(
            f"capacity.{name}"
            for name in (
                "kind",
                "max_run_hours",
                "max_wait_hours",
                "max_pending_hours",
                "training_plan_arn",
                "keep_alive_minutes",
                "max_retries",
                "failures",
            )
        ),
        *(
            f"target.{name}"
            for name in (
                "image",
                "framework_version",
                "network_isolation",
                "encrypt_inter_container_traffic",
                "infra_check",
                "remote_debug",
                "grace_s",
                "environment",
            )
        ),
        *(
            f"env.{name}"
            for name in (
                "name",
                "role_arn",
                "subnets",
                "security_groups",
                "kms_key_id",
                "fsx_tier",
                "fsx_capacity_gib",
                "tags",
            )
        ),
    }
)


def changes_refused(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Problem]:
    """A problem for every value that lasts and is another in `after`; both are recipes as plain data."""
    return [
        Problem(
            changed,
            f"{as_typed(new)}, and the run was launched with {as_typed(old)}: {why}",
            f"leave it at {as_typed(old)}, or launch a new run",
        )
        for key, why in LASTING.items()
        for changed, old, new in _differences(key, _value(before, key), _value(after, key))
    ]


def _value(data: Any, key: str) -> Any:
    for part in key.split("."):
        data = data[part]
    return data


def _differences(key: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in [*old, *(name for name in new if name not in old)]:
            yield from _differences(f"{key}.{name}", old.get(name), new.get(name))
    elif old != new:
        yield key, old, new


def as_typed(value: Any) -> str:
    """As it is typed in an override."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
