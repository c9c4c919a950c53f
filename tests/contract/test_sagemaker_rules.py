"""Errors planted into a rendered request, one at a time: each is found, by its rule and the recipe key to mend."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from sagemaker_cases import ACCOUNT, planned, rendered, request_of

from chimera_sm.checks import run_checks
from chimera_sm.planner.types import Plan
from chimera_sm.targets.base import Artifacts, Finding

Plant = Callable[[dict[str, Any]], Any]
SPOT_FSX = ("recipe=70b", *ACCOUNT)
S3 = ("recipe=8b", *ACCOUNT, "data.uri=s3://ours/shards/")


def edited(artifacts: Artifacts, plant: Plant) -> Artifacts:
    request = copy.deepcopy(request_of(artifacts))
    plant(request)
    return replace(artifacts, files={**artifacts.files, "create_training_job.json": json.dumps(request).encode()})


def found(overrides: tuple[str, ...], plant: Plant) -> list[Finding]:
    """What the planted error adds to the findings."""
    plan, artifacts = planned(*overrides), rendered(*overrides)
    before = run_checks(plan, artifacts)
    return [finding for finding in run_checks(plan, edited(artifacts, plant)) if finding not in before]


def put(path: str, value: Any) -> Plant:
    """Set what stands at a dotted path; lists by number."""

    def plant(request: dict[str, Any]) -> None:
        *steps, last = path.split(".")
        at: Any = request
        for step in steps:
            at = at[int(step)] if isinstance(at, list) else at.setdefault(step, {})
        at[int(last) if isinstance(at, list) else last] = copy.deepcopy(value)

    return plant


def drop(path: str) -> Plant:
    def plant(request: dict[str, Any]) -> None:
        *steps, last = path.split(".")
        at: Any = request
        for step in steps:
            at = at[int(step)] if isinstance(at, list) else at[step]
        del at[last]

    return plant


def both(*plants: Plant) -> Plant:
    return lambda request: [plant(request) for plant in plants]


GROUPS = [
    {"InstanceType": "ml.p4d.24xlarge", "InstanceCount": 2, "InstanceGroupName": "a"},
    {"InstanceType": "ml.p4d.24xlarge", "InstanceCount": 2, "InstanceGroupName": "b"},
]
PREFERENCES = [
    {"InstanceType": "ml.p5.48xlarge", "InstanceCount": 4},
    {"InstanceType": "ml.p5en.48xlarge", "InstanceCount": 4},
]
PLAN_ARN = "arn:aws:sagemaker:us-east-1:123456789012:training-plan/ours"
GROUPED = put("ResourceConfig", {"InstanceGroups": GROUPS})
PREFERRED = put("ResourceConfig", {"InstancePreferences": PREFERENCES})
DATA = "InputDataConfig.1.DataSource"

SHAPE: list[tuple[str, Plant, str, str]] = [
    ("underscore in the name", put("TrainingJobName", "my_run"), "request_pattern", "name"),
    ("name too long", put("TrainingJobName", "a" * 64), "request_max", "name"),
    ("role of no account", put("RoleArn", "arn:aws:iam::12:role/train-jobs"), "request_pattern", "env.role_arn"),
    ("no role", drop("RoleArn"), "request_required", "env.role_arn"),
    ("no such type", put("ResourceConfig.InstanceType", "ml.p4d.48xlarge"), "request_enum", "instances.type"),
    ("count below 0", put("ResourceConfig.InstanceCount", -1), "request_min", "instances.count"),
    ("count as text", put("ResourceConfig.InstanceCount", "32"), "request_type", "instances.count"),
    ("warm for too long", put("ResourceConfig.KeepAlivePeriodInSeconds", 999_999), "request_max",
     "capacity.keep_alive_minutes"),
    ("plan's ARN", put("ResourceConfig.TrainingPlanArn", "x" * 60), "request_pattern", "capacity.training_plan_arn"),
    ("run of 0 s", put("StoppingCondition.MaxRuntimeInSeconds", 0), "request_min", "capacity.max_run_hours"),
    ("pending too short", put("StoppingCondition.MaxPendingTimeInSeconds", 60), "request_min",
     "capacity.max_pending_hours"),
    ("long variable", put("Environment.LONG", "x" * 600), "request_max", "target.environment.LONG"),
    ("variable's name", put("Environment.A-B", "x"), "request_pattern", "target.environment.A-B"),
    ("121 hyperparameters", put("HyperParameters", {f"k{i}": "v" for i in range(121)}), "request_max",
     "HyperParameters"),
    ("long hyperparameter", put("HyperParameters.x", "v" * 2600), "request_max", "HyperParameters.x"),
    ("21 channels", lambda r: r["InputDataConfig"].extend([r["InputDataConfig"][0]] * 19), "request_max", "data.uri"),
    ("channel's name", put("InputDataConfig.1.ChannelName", "a b"), "request_pattern", "data.channel"),
    ("input mode", put("InputDataConfig.1.InputMode", "Stream"), "request_enum", "data.input_mode"),
    ("file system's id", put(f"{DATA}.FileSystemDataSource.FileSystemId", "fs-xyz0000000"), "request_pattern",
     "env.fsx_file_system_id"),
    ("6 security groups", put("VpcConfig.SecurityGroupIds", ["sg-1"] * 6), "request_max", "env.security_groups"),
    ("no subnet", put("VpcConfig.Subnets", []), "request_min", "env.subnets"),
    ("tag's characters", put("Tags.0.Value", "a;b"), "request_pattern", "env.tags"),
    ("51 tags", put("Tags", [{"Key": f"k{i}", "Value": ""} for i in range(51)]), "request_max", "env.tags"),
    ("no such member", put("ResourceConfig.InstanceTypes", ["x"]), "request_unknown", "instances"),
    ("31 retries", put("RetryStrategy.MaximumRetryAttempts", 31), "request_max", "capacity.max_retries"),
    ("output compression", put("OutputDataConfig.CompressionType", "ZIP"), "request_enum", "env.bucket"),
    ("spot as text", put("EnableManagedSpotTraining", "true"), "request_type", "capacity.kind"),
]  # fmt: skip


@pytest.mark.parametrize(("plant", "rule", "where"), [case[1:] for case in SHAPE], ids=[case[0] for case in SHAPE])
def test_a_broken_shape_is_found(plant: Plant, rule: str, where: str) -> None:
    findings = found(SPOT_FSX, plant)
    assert (f"offline.{rule}", where, "error") in [(f.id, f.where, f.severity) for f in findings]


RULES: list[tuple[str, tuple[str, ...], Plant, str, str, str]] = [
    ("R1 no MaxWait", SPOT_FSX, drop("StoppingCondition.MaxWaitTimeInSeconds"), "spot_max_wait", "error",
     "capacity.max_wait_hours"),
    ("R1 MaxWait too small", SPOT_FSX, put("StoppingCondition.MaxWaitTimeInSeconds", 3600), "spot_max_wait", "error",
     "capacity.max_wait_hours"),
    ("R2", S3, put("StoppingCondition.MaxWaitTimeInSeconds", 864_000), "max_wait_without_spot", "error",
     "capacity.max_wait_hours"),
    ("R3", SPOT_FSX, drop("CheckpointConfig"), "spot_without_checkpoint", "error", "checkpoint.s3_uri"),
    ("R4 spot", SPOT_FSX, put("ResourceConfig.KeepAlivePeriodInSeconds", 600), "warm_pool", "error",
     "capacity.keep_alive_minutes"),
    ("R4 groups", S3, both(GROUPED, put("ResourceConfig.KeepAlivePeriodInSeconds", 600)), "warm_pool", "error",
     "capacity.keep_alive_minutes"),
    ("R4 training plan", S3, both(put("ResourceConfig.KeepAlivePeriodInSeconds", 600),
     put("ResourceConfig.TrainingPlanArn", PLAN_ARN)), "warm_pool", "warning", "capacity.keep_alive_minutes"),
    ("R5", SPOT_FSX, put("ResourceConfig.InstanceGroups", GROUPS), "instance_groups", "error", "instances.type"),
    ("R5 spot", SPOT_FSX, GROUPED, "instance_groups", "warning", "instances.type"),
    ("R6 some", S3, both(GROUPED, put(f"{DATA}.S3DataSource.InstanceGroupNames", ["a"])), "channel_groups", "error",
     "data.channel"),
    ("R6 unknown", S3, put(f"{DATA}.S3DataSource.InstanceGroupNames", ["z"]), "channel_groups", "error",
     "data.channel"),
    ("R6 FSx", SPOT_FSX, both(GROUPED, put("InputDataConfig.0.DataSource.S3DataSource.InstanceGroupNames", ["a"])),
     "channel_groups", "warning", "data.channel"),
    ("R7", S3, both(GROUPED, put("ResourceConfig.InstanceGroups.1.InstanceType", "ml.trn1.32xlarge")),
     "one_image_for_all", "error", "instances.type"),
    ("R8 spot", S3, both(PREFERRED, put("EnableManagedSpotTraining", True)), "instance_preferences", "error",
     "instances.fallbacks"),
    ("R8 type", S3, put("ResourceConfig.InstancePreferences", PREFERENCES), "instance_preferences", "error",
     "instances.fallbacks"),
    ("R8 counts", S3, both(PREFERRED, drop("ResourceConfig.InstancePreferences.0.InstanceCount")),
     "instance_preferences", "error", "instances.fallbacks"),
    ("R8 two counts", S3, both(PREFERRED, put("ResourceConfig.InstanceCount", 4)), "instance_preferences", "error",
     "instances.fallbacks"),
    ("R8 twice", S3, both(PREFERRED, put("ResourceConfig.InstancePreferences.1.InstanceType", "ml.p5.48xlarge")),
     "instance_preferences", "error", "instances.fallbacks"),
    ("R8 plans", S3, both(PREFERRED, put("ResourceConfig.TrainingPlanArn", PLAN_ARN),
     put("ResourceConfig.InstancePreferences.0.TrainingPlanArns", [PLAN_ARN])), "instance_preferences", "error",
     "instances.fallbacks"),
    ("R9 spot", SPOT_FSX, put("ResourceConfig.TrainingPlanArn", PLAN_ARN), "training_plan", "warning",
     "capacity.training_plan_arn"),
    ("R9 type", S3, both(put("ResourceConfig.TrainingPlanArn", PLAN_ARN),
     put("ResourceConfig.InstanceType", "ml.g5.48xlarge")), "training_plan", "error", "instances.type"),
    ("R9 region", S3, put("ResourceConfig.TrainingPlanArn", PLAN_ARN.replace("us-east-1", "eu-west-1")),
     "training_plan", "error", "capacity.training_plan_arn"),
    ("R10 no VPC", SPOT_FSX, drop("VpcConfig"), "file_system", "error", "env.subnets"),
    ("R10 mount name", SPOT_FSX, put(f"{DATA}.FileSystemDataSource.DirectoryPath", "/"), "file_system", "error",
     "env.fsx_mount_name"),
    ("R10 input mode", SPOT_FSX, put("InputDataConfig.1.InputMode", "FastFile"), "file_system", "error",
     "data.input_mode"),
    ("R10 subnets", SPOT_FSX, put("VpcConfig.Subnets", ["subnet-1", "subnet-2"]), "file_system", "error",
     "env.subnets"),
    ("R10 read-only", SPOT_FSX, put(f"{DATA}.FileSystemDataSource.FileSystemAccessMode", "ro"), "file_system", "error",
     "checkpoint.storage"),
    ("R11 debug", S3, both(put("EnableNetworkIsolation", True), put("RemoteDebugConfig.EnableRemoteDebug", True)),
     "network_isolation", "error", "target.network_isolation"),
    ("R11 tracker", S3, both(put("EnableNetworkIsolation", True), put("Environment.WANDB_PROJECT", "p")),
     "network_isolation", "warning", "target.environment.WANDB_PROJECT"),
    ("R12", S3, put("EnableInterContainerTrafficEncryption", True), "encrypted_efa", "warning",
     "target.encrypt_inter_container_traffic"),
    ("R13", S3, put("VpcConfig.Subnets", ["subnet-1", "subnet-2"]), "efa_subnet", "error", "env.subnets"),
    ("R14", S3, put("RemoteDebugConfig.EnableRemoteDebug", True), "remote_debug", "info", "target.remote_debug"),
    ("R15", S3, put("ResourceConfig.VolumeKmsKeyId", "1234abcd"), "volume", "error", "env.kms_key_id"),
    ("R16 manifest", S3, put(f"{DATA}.S3DataSource.S3DataType", "ManifestFile"), "fast_file", "error",
     "data.input_mode"),
    ("R16 slash", S3, put(f"{DATA}.S3DataSource.S3Uri", "s3://ours/shards"), "fast_file", "error", "data.uri"),
    ("R17", S3, put(f"{DATA}.S3DataSource.S3DataDistributionType", "ShardedByS3Key"), "sharded_by_key", "error",
     "data.uri"),
    ("R18 key", S3, put("OutputDataConfig.KmsKeyId", "arn:aws:kms:eu-west-1:123456789012:key/1234abcd"),
     "region_of_keys_and_buckets", "error", "env.kms_key_id"),
    ("R18 bucket", S3, put("CheckpointConfig.S3Uri", "s3://sagemaker-eu-west-1-123456789012/c"),
     "region_of_keys_and_buckets", "warning", "checkpoint.s3_uri"),
    ("R19", S3, put("OutputDataConfig", {"S3OutputPath": "s3://o--use1-az4--x-s3/o", "KmsKeyId": "1234abcd"}),
     "express_key", "error", "env.kms_key_id"),
    ("R20", S3, put("ResourceConfig.KeepAlivePeriodInSeconds", 600), "warm_pool_match", "info",
     "capacity.keep_alive_minutes"),
    ("no machines", S3, put("ResourceConfig", {}), "machines", "error", "instances.type"),
    ("volume ignored", S3, put("ResourceConfig.VolumeSizeInGB", 100), "volume", "warning", "instances.volume_gb"),
    ("too long a run", S3, put("StoppingCondition.MaxRuntimeInSeconds", 2_500_000), "longest_run", "error",
     "capacity.max_run_hours"),
    ("pending on CPU", S3, both(put("ResourceConfig.InstanceType", "ml.c5.xlarge"),
     put("StoppingCondition.MaxPendingTimeInSeconds", 7200)), "max_pending", "warning", "capacity.max_pending_hours"),
    ("channel twice", S3, put("InputDataConfig.1.ChannelName", "code"), "channels", "error", "data.channel"),
    ("two sources", SPOT_FSX, put(f"{DATA}.S3DataSource", {"S3DataType": "S3Prefix", "S3Uri": "s3://ours/"}),
     "channels", "error", "data.channel"),
    ("image and algorithm", S3, put("AlgorithmSpecification.AlgorithmName", "ours"), "image_or_algorithm", "error",
     "target.image"),
    ("shell", S3, put("AlgorithmSpecification.ContainerEntrypoint", ["/bin/bash", "-c", "x"]), "entrypoint", "error",
     "target.image"),
    ("no entry point", S3, drop("AlgorithmSpecification.ContainerEntrypoint"), "entrypoint", "error", "target.image"),
    ("folder not synced", S3, put("CheckpointConfig.LocalPath", "/opt/ml/other"), "checkpoint_folder", "error",
     "checkpoint.path"),
    ("secret", S3, put("Environment.HF_TOKEN", "value"), "environment", "error", "target.environment.HF_TOKEN"),
    ("tag twice", S3, lambda r: r["Tags"].append(r["Tags"][0]), "tags", "error", "env.tags"),
    ("AWS's tag", S3, put("Tags.0.Key", "aws:x"), "tags", "error", "env.tags"),
]  # fmt: skip


@pytest.mark.parametrize("case", RULES, ids=[case[0] for case in RULES])
def test_a_broken_rule_is_found(case: tuple[str, tuple[str, ...], Plant, str, str, str]) -> None:
    _, overrides, plant, rule, severity, where = case
    findings = found(overrides, plant)
    assert (f"offline.{rule}", severity, where) in [(f.id, f.severity, f.where) for f in findings]


def test_fi_provider_on_a_type_without_efa() -> None:
    findings = found(
        S3, both(put("ResourceConfig.InstanceType", "ml.g5.xlarge"), put("Environment.FI_PROVIDER", "efa"))
    )
    assert "offline.fi_provider" in [f.id for f in findings]


@pytest.mark.parametrize("overrides", [SPOT_FSX, S3])
def test_the_requests_that_errors_are_planted_into_are_clean(overrides: tuple[str, ...]) -> None:
    assert run_checks(planned(*overrides), rendered(*overrides)) == []


def test_a_tag_of_the_launchers_own() -> None:
    plan = planned(*S3)
    ours = replace(plan, recipe=replace(plan.recipe, env=replace(plan.recipe.env, tags={"chimera:run-id": "x"})))
    assert ("offline.tags", "env.tags") in [(f.id, f.where) for f in run_checks(ours, rendered(*S3))]


def test_a_value_of_a_variable_is_not_repeated() -> None:
    (finding,) = found(S3, put("Environment.LONG", "x" * 600))
    assert "600 characters, which is above the maximum of 512" in finding.message
    assert "xxx" not in finding.message


def test_rules_that_read_the_request_wait_for_its_shape() -> None:
    ids = {f.id for f in found(SPOT_FSX, both(put("StoppingCondition", "soon"), put("VpcConfig", {})))}
    assert ids == {"offline.request_type", "offline.request_required"}


def ids_of(plan: Plan, artifacts: Artifacts) -> dict[str, Finding]:
    return {finding.where: finding for finding in run_checks(plan, artifacts)}


def test_placeholders_block_the_submit_only() -> None:
    findings = ids_of(planned("recipe=70b"), rendered("recipe=70b"))
    for where in ("env.role_arn", "env.fsx_mount_name"):
        assert (findings[where].severity, findings[where].blocks_submit) == ("warning", True)


def test_an_isolated_container_cannot_install() -> None:
    overrides = (*S3, "target.network_isolation=true")
    (finding,) = [f for f in run_checks(planned(*overrides), rendered(*overrides)) if f.severity == "warning"]
    assert (finding.id, finding.where) == ("offline.isolated_requirements", "target.network_isolation")
    assert "safetensors" in finding.message


def test_one_host_with_a_fallback_is_no_cluster() -> None:
    one = [{**preference, "InstanceCount": 1} for preference in PREFERENCES]
    several = put("VpcConfig.Subnets", ["subnet-1", "subnet-2"])
    alone = found(S3, both(put("ResourceConfig", {"InstancePreferences": one}), several))
    assert "offline.efa_subnet" not in [f.id for f in alone]
    assert "offline.efa_subnet" in [f.id for f in found(S3, both(PREFERRED, several))]


def test_memory_disk_offer_and_restore() -> None:
    plan = planned(*S3)
    memory = replace(plan.memory, fits=False, total_gib=99.0, capacity_gib=80.0, components_gib={"logits": 99.0})
    disk = replace(plan.disk, fits=False, available_gb=10.0, checkpoints_on_disk_gb=900.0)
    recipe = replace(plan.recipe, env=replace(plan.recipe.env, region="eu-west-3"))
    findings = run_checks(replace(plan, memory=memory, disk=disk, recipe=recipe), rendered(*S3))
    severities = {finding.id: finding.severity for finding in findings}
    assert severities["offline.memory_fits"] == severities["offline.disk_fits"] == "error"
    assert severities["offline.instance_offered"] == severities["offline.slow_restore"] == "warning"
    assert severities["offline.image_or_algorithm"] == "error"  # the image is in the other region
    memory_finding = next(f for f in findings if f.id == "offline.memory_fits")
    assert "99.0 GiB of 80.0 GiB" in memory_finding.message


@pytest.mark.parametrize(
    ("overrides", "rule", "where"),
    [
        ((*S3, "checkpoint.storage=shared"), "checkpoint_folder", "checkpoint.storage"),
        ((*S3, "checkpoint.path=elsewhere"), "checkpoint_folder", "checkpoint.path"),
        ((*SPOT_FSX, "checkpoint.path=checkpoints"), "checkpoint_folder", "checkpoint.path"),
        ((*SPOT_FSX, "checkpoint.path=input/data/fsx/all"), "checkpoint_folder", "checkpoint.path"),
        (("recipe=70b", "precision=fp8"), "float8_hardware", "precision.float8"),
        (("recipe=8b", "precision=mxfp8"), "float8_hardware", "precision.float8"),
        (
            ("recipe=8b", "precision=fp8", "instances.fallbacks=[{type: ml.p4d.24xlarge, count: 4}]"),
            "float8_hardware",
            "instances.fallbacks[0].type",
        ),
    ],
)
def test_a_recipe_that_breaks_a_rule(overrides: tuple[str, ...], rule: str, where: str) -> None:
    findings = run_checks(planned(*overrides), rendered(*overrides))
    assert (f"offline.{rule}", where) in [(f.id, f.where) for f in findings]
