"""Rules over which machines a training job asks for, and for how long.

Sources: "model" is the prose of botocore's service model of SageMaker (2017-07-24, botocore 1.44); "guide" is the
Amazon SageMaker developer guide. What neither says for certain is a warning.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from chimera_sm.aws.shapes import service_model
from chimera_sm.catalog import region
from chimera_sm.planner.types import Plan

from .registry import Said, TrainingJob, job_rule

DEFAULT_MAX_RUN_S = 86_400
LONGEST_RUN_S = 28 * 86_400


@job_rule("spot_max_wait", "capacity.max_wait_hours")
def spot_max_wait(job: TrainingJob) -> Iterator[Said]:
    """Spot needs a longest wait, which counts running and waiting together (model)."""
    wait, run = job.stopping.get("MaxWaitTimeInSeconds"), job.stopping.get("MaxRuntimeInSeconds", DEFAULT_MAX_RUN_S)
    if job.spot and wait is None:
        yield Said("spot capacity needs MaxWaitTimeInSeconds", f"set it to {run / 3600:g} hours or more")
    elif job.spot and wait is not None and wait < run:
        yield Said(
            f"MaxWaitTimeInSeconds={wait} is below MaxRuntimeInSeconds={run}, which it includes",
            f"set it to {run / 3600:g} hours or more",
        )


@job_rule("max_wait_without_spot", "capacity.max_wait_hours")
def max_wait_without_spot(job: TrainingJob) -> Iterator[Said]:
    """CreateTrainingJob: "Invalid MaxWaitTimeInSeconds. It is only supported when EnableManagedSpotTraining is set"."""
    if not job.spot and "MaxWaitTimeInSeconds" in job.stopping:
        yield Said("MaxWaitTimeInSeconds is for spot capacity only", "set it to null, or capacity.kind=spot")


@job_rule("spot_without_checkpoint", "checkpoint.s3_uri")
def spot_without_checkpoint(job: TrainingJob) -> Iterator[Said]:
    """An interrupted job without one starts again from zero (guide: managed spot training)."""
    if job.spot and "CheckpointConfig" not in job.request:
        yield Said("a spot job without CheckpointConfig starts again from zero after an interruption")


@job_rule("warm_pool", "capacity.keep_alive_minutes")
def warm_pool_exclusions(job: TrainingJob) -> Iterator[Said]:
    """Guide: managed warm pools."""
    if job.keep_alive_s and job.spot:
        yield Said("machines cannot be kept warm on spot capacity", "set it to 0")
    if job.keep_alive_s and job.groups:
        yield Said("machines cannot be kept warm with InstanceGroups", "set it to 0")
    if job.keep_alive_s and "TrainingPlanArn" in job.resources:
        yield Said("no document says that a warm pool goes with a training plan", "set it to 0", severity="warning")


@job_rule("warm_pool_match", "capacity.keep_alive_minutes", severity="info")
def warm_pool_match(job: TrainingJob) -> Iterator[Said]:
    """Which job may reuse a warm pool (guide: matching training jobs)."""
    if job.keep_alive_s:
        yield Said(
            f"machines stay warm for {job.keep_alive_s // 60} minutes, billed; only a job with the same role, instance "
            "type and count, volume size and key, subnets, security groups, traffic encryption and network isolation "
            "will reuse them, and the account's quota for warm pools must allow it"
        )


@job_rule("instance_groups", "instances.type")
def instance_groups(job: TrainingJob) -> Iterator[Said]:
    """Groups stand instead of a type and count; their names are unique; all share one image and one launcher."""
    if not job.groups:
        return
    for field in ("InstanceType", "InstanceCount"):
        if field in job.resources:
            yield Said(f"ResourceConfig has both InstanceGroups and {field}", f"leave {field} out")
    for name, count in Counter(group["InstanceGroupName"] for group in job.groups).items():
        if count > 1:
            yield Said(f"{count} instance groups are called {name!r}", "give each group a name of its own")
    if job.spot:
        yield Said("no document says that spot capacity goes with InstanceGroups", severity="warning")


@job_rule("one_image_for_all", "instances.type")
def one_image_for_all(job: TrainingJob) -> Iterator[Said]:
    """All groups run the same image and entry point, as one world of equal workers."""
    kinds = {(facts.is_trainium, facts.accelerators) for facts in job.instances}
    if len(job.hosts) > 1 and len(kinds) > 1:
        described = ", ".join(f"{f.type} ({f.accelerators} × {f.accelerator})" for f in job.instances)
        yield Said(
            f"one image and one launcher serve all machines of a job, but these differ: {described}",
            "choose types with the same number and kind of accelerators",
        )


@job_rule("machines", "instances.type")
def machines(job: TrainingJob) -> Iterator[Said]:
    """A job names its machines once (model)."""
    if not job.hosts:
        yield Said("ResourceConfig names no machines")
    elif not job.groups and not job.preferences and job.resources.get("InstanceCount", 0) < 1:
        yield Said("ResourceConfig.InstanceCount is missing or 0", where="instances.count")


@job_rule("instance_preferences", "instances.fallbacks")
def instance_preferences(job: TrainingJob) -> Iterator[Said]:
    """Exclusions of InstancePreferences (model)."""
    if not job.preferences:
        return
    for field in ("InstanceType", "InstanceGroups", "InstancePlacementConfig"):
        if field in job.resources:
            yield Said(f"InstancePreferences excludes {field}", f"leave {field} out")
    if job.spot:
        yield Said(
            "fallbacks are for on-demand capacity and training plans; InstancePreferences excludes spot",
            "set capacity=on_demand, or instances.fallbacks=[]",
        )
    counted = ["InstanceCount" in preference for preference in job.preferences]
    if any(counted) and not all(counted):
        yield Said("some instance preferences have a count and others none", "give every one a count")
    if all(counted) and "InstanceCount" in job.resources:
        yield Said("InstanceCount stands on the preferences and beside them", "leave one of the two out")
    if not any(counted) and "InstanceCount" not in job.resources:
        yield Said("instance preferences have no count")
    for kind, number in Counter(preference["InstanceType"] for preference in job.preferences).items():
        if number > 1:
            yield Said(f"{kind} stands {number} times among the instance preferences", "name each type once")
    if "TrainingPlanArn" in job.resources and any("TrainingPlanArns" in p for p in job.preferences):
        yield Said("training plans stand on the preferences and beside them", "leave one of the two out")


@job_rule("training_plan", "capacity.training_plan_arn")
def training_plan(job: TrainingJob) -> Iterator[Said]:
    """Plans reserve certain types only (model: ReservedCapacityInstanceType), in one region."""
    everywhere = [job.resources["TrainingPlanArn"]] if "TrainingPlanArn" in job.resources else []
    uses = [
        (entry["InstanceType"], arn)
        for entry in job.groups or job.preferences or [job.resources]
        for arn in everywhere + entry.get("TrainingPlanArns", [])
        if "InstanceType" in entry
    ]
    arns = list(dict.fromkeys([*everywhere, *(arn for _, arn in uses)]))
    if not arns:
        if job.plan.recipe.capacity.kind == "reserved":
            yield Said("capacity.kind=reserved needs the ARN of a training plan")
        return
    if job.spot:
        yield Said(
            "a training plan is reserved capacity, spot is not; no document says that they go together",
            "set capacity.kind=reserved",
            severity="warning",
        )
    reservable = service_model("sagemaker").enum("ReservedCapacityInstanceType")
    for number, kind in enumerate(dict.fromkeys(kind for kind, _ in uses)):
        if kind not in reservable:
            yield Said(
                f"training plans do not reserve {kind}",
                f"they reserve {', '.join(reservable)}",
                where="instances.fallbacks" if job.preferences and number else "instances.type",
            )
    for arn in arns:
        kinds = sorted({kind for kind, used in uses if used == arn})
        if len(kinds) > 1:
            yield Said(
                f"one training plan reserves one instance type, and {arn} is used for {', '.join(kinds)}",
                "instances.fallbacks=[]",
                where="instances.fallbacks" if job.preferences else "instances.type",
            )
        yield from wrong_place(job.plan, "the training plan", arn)


@job_rule("volume", "instances.volume_gb")
def volume(job: TrainingJob) -> Iterator[Said]:
    """Types with NVMe disks get no EBS volume: its size is ignored, a key for it is refused (model)."""
    with_disks = [facts.type for facts in job.instances if facts.nvme_gb]
    without = [facts.type for facts in job.instances if not facts.nvme_gb]
    if with_disks and "VolumeKmsKeyId" in job.resources:
        yield Said(
            f"VolumeKmsKeyId is not allowed with {', '.join(with_disks)}, whose NVMe disks encrypt themselves",
            "leave VolumeKmsKeyId out",
            where="env.kms_key_id",
        )
    if with_disks and not without and "VolumeSizeInGB" in job.resources:
        yield Said(
            f"VolumeSizeInGB is ignored by {', '.join(with_disks)}, which use their NVMe disks", severity="warning"
        )
    if without and not job.resources.get("VolumeSizeInGB"):
        yield Said(f"{', '.join(without)} have no disk of their own and need VolumeSizeInGB")


@job_rule("longest_run", "capacity.max_run_hours")
def longest_run(job: TrainingJob) -> Iterator[Said]:
    """28 days (guide: quotas); the model has no maximum."""
    run = job.stopping.get("MaxRuntimeInSeconds", DEFAULT_MAX_RUN_S)
    if run > LONGEST_RUN_S:
        yield Said(f"MaxRuntimeInSeconds={run} is above SageMaker's limit of 28 days ({LONGEST_RUN_S})")


@job_rule("max_pending", "capacity.max_pending_hours", severity="warning")
def max_pending(job: TrainingJob) -> Iterator[Said]:
    """Has an effect on p, g and trn types only (model)."""
    others = [kind for kind, _ in job.hosts if not re.match(r"ml\.(p|g|trn)\d", kind)]
    if "MaxPendingTimeInSeconds" in job.stopping and others:
        yield Said(f"MaxPendingTimeInSeconds has no effect on {', '.join(others)}", "set it to null")


def wrong_place(plan: Plan, what: str, arn: str, *, own_account: bool = True) -> Iterator[Said]:
    """An ARN says its partition, region and account. A job takes what is in its own partition and region, and
    (`own_account`) in its own account, where the recipe says which that is."""
    parts = arn.split(":", 5)
    if len(parts) < 6 or parts[0] != "arn":
        return
    env = plan.recipe.env
    partition = region(env.region).partition
    if parts[1] != partition:
        yield Said(
            f"{what} is in the partition {parts[1]}, the job's region {env.region} in {partition}: {arn}",
            f"an ARN that begins with arn:{partition}:, or the env.region that it belongs to",
        )
    if parts[3] not in ("", env.region):
        yield Said(f"{what} is in {parts[3]}, the job in {env.region}: {arn}")
    if own_account and env.account_id is not None and parts[4] not in ("", env.account_id):
        yield Said(
            f"{what} is of the account {parts[4]}, and env.account_id is {env.account_id}: {arn}",
            f"one of the account {env.account_id}, or env.account_id={parts[4]}",
        )
