"""The request against botocore's service model, with the recipe key that mends each violation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from chimera_sm.aws.shapes import Violation, service_model
from chimera_sm.targets.base import Finding

# Path in the request → recipe key; the longest beginning that fits wins.
_KEYS = {
    "TrainingJobName": "name",
    "RoleArn": "env.role_arn",
    "AlgorithmSpecification.TrainingImage": "target.image",
    "InputDataConfig": "data.uri",
    "InputDataConfig.ChannelName": "data.channel",
    "InputDataConfig.InputMode": "data.input_mode",
    "InputDataConfig.DataSource.FileSystemDataSource.FileSystemId": "env.fsx_file_system_id",
    "InputDataConfig.DataSource.FileSystemDataSource.DirectoryPath": "env.fsx_mount_name",
    "CheckpointConfig": "checkpoint.s3_uri",
    "OutputDataConfig": "env.bucket",
    "OutputDataConfig.KmsKeyId": "env.kms_key_id",
    "ResourceConfig": "instances",
    "ResourceConfig.InstanceType": "instances.type",
    "ResourceConfig.InstanceCount": "instances.count",
    "ResourceConfig.InstancePreferences": "instances.fallbacks",
    "ResourceConfig.VolumeSizeInGB": "instances.volume_gb",
    "ResourceConfig.VolumeKmsKeyId": "env.kms_key_id",
    "ResourceConfig.KeepAlivePeriodInSeconds": "capacity.keep_alive_minutes",
    "ResourceConfig.TrainingPlanArn": "capacity.training_plan_arn",
    "VpcConfig": "env.subnets",
    "VpcConfig.SecurityGroupIds": "env.security_groups",
    "StoppingCondition": "capacity.max_run_hours",
    "StoppingCondition.MaxWaitTimeInSeconds": "capacity.max_wait_hours",
    "StoppingCondition.MaxPendingTimeInSeconds": "capacity.max_pending_hours",
    "Environment": "target.environment",
    "Tags": "env.tags",
    "RetryStrategy": "capacity.max_retries",
    "EnableManagedSpotTraining": "capacity.kind",
    "EnableNetworkIsolation": "target.network_isolation",
    "EnableInterContainerTrafficEncryption": "target.encrypt_inter_container_traffic",
    "InfraCheckConfig": "target.infra_check",
    "RemoteDebugConfig": "target.remote_debug",
}


def shape_findings(request: Any) -> Iterator[Finding]:
    for violation in service_model("sagemaker").validate("CreateTrainingJob", request):
        yield Finding(
            id=f"offline.request_{violation.rule}",
            severity="error",
            message=_message(violation),
            where=recipe_key(violation.path),
            fix=violation.fix,
        )


def recipe_key(path: str) -> str:
    """The recipe key that sets what stands at `path` of a request; the path itself where none does.

    >>> recipe_key("ResourceConfig.InstancePreferences[1].InstanceType")
    'instances.fallbacks'
    """
    plain = re.sub(r"\[\d+\]", "", path)
    fits = [known for known in _KEYS if plain == known or plain.startswith(f"{known}.")]
    if not fits:
        return path
    key = _KEYS[max(fits, key=len)]
    name = plain.removeprefix("Environment.").removesuffix(" (key)")
    return f"{key}.{name}" if plain.startswith("Environment.") else key


def _message(violation: Violation) -> str:
    """Says the path, unless no recipe key stands in front of it: then the path does, and is enough."""
    at = "" if recipe_key(violation.path) == violation.path else violation.path
    if violation.rule == "required":
        return f"{at} is required by CreateTrainingJob".strip()
    # Values of variables and hyperparameters may be anything: they are not repeated. Whole structures say nothing.
    hidden = violation.path.startswith(("Environment.", "HyperParameters.")) and not violation.path.endswith("(key)")
    text = "" if hidden or isinstance(violation.value, dict | list) else repr(violation.value)
    shown = "" if violation.rule in ("type", "union") else text if len(text) <= 80 else f"{text[:77]}…"
    words = " ".join(word for word in (shown, violation.message) if word)
    return f"{at}: {words}" if at else words
