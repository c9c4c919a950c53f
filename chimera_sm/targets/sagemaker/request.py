"""A plan to the CreateTrainingJob request.

Facts: botocore's service model of SageMaker (2017-07-24, botocore 1.44), the developer guide's pages on training
storage, VPC and FSx for Lustre. The rules that this builder keeps are checked again, on the finished request, by
`chimera_sm.checks`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from chimera_sm.aws.secrets import scan_variable
from chimera_sm.catalog import instance, region, training_image
from chimera_sm.errors import ChecksFailed
from chimera_sm.planner.types import Plan, Segment
from chimera_sm.targets.base import Placeholder
from chimera_train.config.contract import CODE_CHANNEL, DEFAULT_ML_ROOT, MODEL_CHANNEL, RUN_ID_VARIABLE
from chimera_train.metrics import METRICS, evaluation_regexes

RUN_ID_TAG = "chimera:run-id"
RECIPE_HASH_TAG = "chimera:recipe-hash"
MAX_JOB_NAME = 63
CHECKPOINT_PATH = f"{DEFAULT_ML_ROOT}/checkpoints"
ENTRYPOINT = ["python3", "-u", f"{DEFAULT_ML_ROOT}/input/data/{CODE_CHANNEL}/launch.py"]
"""Python is PID 1: a shell in between would swallow SIGTERM."""
SAMPLE_BUCKET = "my-bucket"
"""Stands in the shipped `data=s3` for a bucket of the team's own."""


class Account:
    """The team's values, and placeholders for those that are missing, which satisfy AWS's patterns."""

    def __init__(self, plan: Plan):
        self.env = plan.recipe.env
        self.placeholders: list[Placeholder] = []

    def _or(self, key: str, value: str | None, placeholder: str, fix: str) -> str:
        if value is not None:
            return value
        found = Placeholder(key=key, value=placeholder, fix=fix)
        if found not in self.placeholders:
            self.placeholders.append(found)
        return placeholder

    @property
    def role_arn(self) -> str:
        account = self.env.account_id or "000000000000"
        placeholder = f"arn:{region(self.env.region).partition}:iam::{account}:role/placeholder"
        return self._or("env.role_arn", self.env.role_arn, placeholder, "the IAM role that the job runs as")

    @property
    def bucket(self) -> str:
        fix = f"an S3 bucket in {self.env.region} for code, checkpoints and output"
        return self._or("env.bucket", self.env.bucket, "placeholder-bucket", fix)

    @property
    def subnets(self) -> list[str]:
        fix = "the subnet of the job: [subnet-…]; with FSx for Lustre, the file system's own"
        return list(self.env.subnets) or [self._or("env.subnets", None, "subnet-00000000000000000", fix)]

    @property
    def security_groups(self) -> list[str]:
        fix = "[sg-…]: lets its own members through in and out; with FSx for Lustre TCP 988 and 1018-1023"
        return list(self.env.security_groups) or [self._or("env.security_groups", None, "sg-00000000000000000", fix)]

    @property
    def file_system_id(self) -> str:
        fix = "fs-…, as `aws fsx describe-file-systems` lists it"
        return self._or("env.fsx_file_system_id", self.env.fsx_file_system_id, "fs-00000000000000000", fix)

    @property
    def mount_name(self) -> str:
        fix = "LustreConfiguration.MountName in `aws fsx describe-file-systems`"
        return self._or("env.fsx_mount_name", self.env.fsx_mount_name, "placehld", fix)

    def data_uri(self, uri: str) -> str:
        if uri.removeprefix("s3://").split("/")[0] != SAMPLE_BUCKET:
            return uri
        return self._or(
            "data.uri", None, uri, f"s3://<your bucket>/<prefix>/ of the shards; s3://{SAMPLE_BUCKET} is a sample"
        )


def build_request(plan: Plan, run_id: str, code_sha256: str) -> tuple[dict[str, Any], tuple[Placeholder, ...]]:
    """The request for the run's first segment, and the placeholders in it.

    Raises ChecksFailed if `target.environment` holds a secret: it would stand in every record of the run.
    """
    recipe, account = plan.recipe, Account(plan)
    prefix = f"s3://{account.bucket}/chimera"
    request: dict[str, Any] = {
        "TrainingJobName": job_name(run_id),
        "RoleArn": account.role_arn,
        "AlgorithmSpecification": {
            "TrainingImage": recipe.target.image or _default_image(plan),
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ENTRYPOINT,
            "MetricDefinitions": _metric_definitions(plan),
        },
        "HyperParameters": {"recipe": recipe.name, "recipe_hash": plan.recipe_hash, "run_id": run_id},
        "InputDataConfig": [
            _s3_channel(CODE_CHANNEL, f"{prefix}/code/{code_sha256}/", "File"),
            _data_channel(plan, account),
            *_model_channel(plan, account),
        ],
        "CheckpointConfig": {
            "S3Uri": (recipe.checkpoint.s3_uri or f"{prefix}/runs/{{run_id}}/checkpoints").replace("{run_id}", run_id),
            "LocalPath": CHECKPOINT_PATH,
        },
        "OutputDataConfig": {"S3OutputPath": f"{prefix}/runs/{run_id}/output", "CompressionType": "NONE"},
        "ResourceConfig": _resources(plan),
        "StoppingCondition": stopping_condition(plan.segments[0], recipe.capacity.max_pending_hours),
        "EnableManagedSpotTraining": recipe.capacity.kind == "spot",
        "EnableNetworkIsolation": recipe.target.network_isolation,
        "EnableInterContainerTrafficEncryption": recipe.target.encrypt_inter_container_traffic,
        "InfraCheckConfig": {"EnableInfraCheck": recipe.target.infra_check},
        "Environment": _environment(plan, run_id),
        "Tags": [
            {"Key": key, "Value": value}
            for key, value in {RUN_ID_TAG: run_id, RECIPE_HASH_TAG: plan.recipe_hash, **recipe.env.tags}.items()
        ],
    }
    if recipe.env.kms_key_id:
        request["OutputDataConfig"]["KmsKeyId"] = recipe.env.kms_key_id
    weights_on_fsx = (recipe.model.weights_uri or "").startswith("/")
    if recipe.data.location == "fsx" or weights_on_fsx or recipe.env.subnets or recipe.env.security_groups:
        request["VpcConfig"] = {"SecurityGroupIds": account.security_groups, "Subnets": account.subnets}
    if recipe.capacity.max_retries:
        request["RetryStrategy"] = {"MaximumRetryAttempts": recipe.capacity.max_retries}
    if recipe.target.remote_debug:
        request["RemoteDebugConfig"] = {"EnableRemoteDebug": True}
    return request, tuple(sorted(account.placeholders, key=lambda p: p.key))


def next_request(
    request: Mapping[str, Any], run_id: str, *, attempt: int, segment: Segment, max_pending_hours: float | None
) -> dict[str, Any]:
    """The same job under another name: a later segment, or another attempt at one. The checkpoints are the same."""
    suffix = (f"-s{segment.index}" if segment.index else "") + (f"-r{attempt}" if attempt else "")
    return {
        **request,
        "TrainingJobName": job_name(run_id, suffix),
        "StoppingCondition": stopping_condition(segment, max_pending_hours),
    }


def to_bytes(request: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(request, indent=2, sort_keys=True, ensure_ascii=False)}\n".encode()


def job_name(run_id: str, suffix: str = "") -> str:
    """At most 63 characters; what is too long is cut out of the name in front of the run id's time stamp."""
    excess = len(run_id) + len(suffix) - MAX_JOB_NAME
    if excess <= 0 or not suffix:
        return f"{run_id}{suffix}"
    stamp = len("-20260101-000000-abcdef")
    return f"{run_id[: -stamp - excess].rstrip('-')}{run_id[-stamp:]}{suffix}"


def stopping_condition(segment: Segment, max_pending_hours: float | None) -> dict[str, int]:
    condition = {"MaxRuntimeInSeconds": segment.max_run_s}
    if segment.max_wait_s is not None:
        condition["MaxWaitTimeInSeconds"] = segment.max_wait_s
    if max_pending_hours is not None:
        condition["MaxPendingTimeInSeconds"] = round(max_pending_hours * 3600)
    return condition


def _default_image(plan: Plan) -> str:
    device: Literal["gpu", "trainium"] = "trainium" if instance(plan.instances[0].type).is_trainium else "gpu"
    return training_image(plan.recipe.env.region, plan.recipe.target.framework_version, device)


def _metric_definitions(plan: Plan) -> list[dict[str, str]]:
    regexes = {metric.name: metric.regex for metric in METRICS}
    for source in plan.recipe.evaluation.sources:
        regexes |= evaluation_regexes(source)
    return [{"Name": name, "Regex": regex} for name, regex in regexes.items()]


def _s3_channel(name: str, uri: str, mode: str) -> dict[str, Any]:
    source = {"S3DataType": "S3Prefix", "S3Uri": uri, "S3DataDistributionType": "FullyReplicated"}
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}, "InputMode": mode}


def _data_channel(plan: Plan, account: Account) -> dict[str, Any]:
    data = plan.recipe.data
    assert data.uri is not None  # the schema requires it of every location but stdlib, which no job reads
    if data.location == "s3":
        # A prefix without the slash at its end would match its siblings too.
        return _s3_channel(data.channel, f"{account.data_uri(data.uri).rstrip('/')}/", data.input_mode)
    mode: Literal["ro", "rw"] = "rw" if plan.recipe.checkpoint.storage == "shared" else "ro"
    return _file_system_channel(data.channel, data.uri, mode, account)


def _model_channel(plan: Plan, account: Account) -> list[dict[str, Any]]:
    """The weights to start from, streamed: a rank reads only what its shards need."""
    uri = plan.recipe.model.weights_uri
    if uri is None:
        return []
    if uri.startswith("/"):
        return [_file_system_channel(MODEL_CHANNEL, uri, "ro", account)]
    return [_s3_channel(MODEL_CHANNEL, f"{uri.rstrip('/')}/", "FastFile")]


def _file_system_channel(name: str, folder: str, mode: Literal["ro", "rw"], account: Account) -> dict[str, Any]:
    source = {
        "FileSystemType": "FSxLustre",
        "FileSystemId": account.file_system_id,
        "DirectoryPath": f"/{account.mount_name}{folder.rstrip('/')}",
        "FileSystemAccessMode": mode,
    }
    return {"ChannelName": name, "DataSource": {"FileSystemDataSource": source}, "InputMode": "File"}


def _resources(plan: Plan) -> dict[str, Any]:
    recipe = plan.recipe
    choices = [{"InstanceType": choice.type, "InstanceCount": choice.count} for choice in plan.instances]
    resources: dict[str, Any] = {"InstancePreferences": choices} if len(choices) > 1 else dict(choices[0])
    if any(choice.nvme_gb == 0 for choice in plan.instances):
        resources["VolumeSizeInGB"] = recipe.instances.volume_gb
        if recipe.env.kms_key_id and all(choice.nvme_gb == 0 for choice in plan.instances):
            resources["VolumeKmsKeyId"] = recipe.env.kms_key_id
    if recipe.capacity.keep_alive_minutes:
        resources["KeepAlivePeriodInSeconds"] = recipe.capacity.keep_alive_minutes * 60
    if recipe.capacity.training_plan_arn:
        resources["TrainingPlanArn"] = recipe.capacity.training_plan_arn
    return resources


def _environment(plan: Plan, run_id: str) -> dict[str, str]:
    """The run's id and the recipe's own variables. NCCL and EFA get none: the image's OFI plugin sets what each
    instance type needs, and an override makes it slower (aws-ofi-nccl, platform-aws.cpp, August 2026)."""
    for name, value in plan.recipe.target.environment.items():
        kind = scan_variable(name, value)
        if kind:
            raise ChecksFailed(
                f"target.environment.{name}: holds a secret ({kind}); it would stand in every record of the run",
                fix="keep it in Secrets Manager and pass the secret's ARN",
            )
    return {**plan.recipe.target.environment, RUN_ID_VARIABLE: run_id}
