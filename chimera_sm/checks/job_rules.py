"""Rules over a training job's channels, network, keys and container. Sources as in `capacity_rules`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from chimera_sm.aws.secrets import scan_variable
from chimera_sm.catalog import regions
from chimera_train.config.contract import CODE_CHANNEL

from .capacity_rules import wrong_place
from .registry import Said, TrainingJob, job_rule

SHELLS = frozenset({"sh", "bash", "dash", "zsh"})


@job_rule("channels", "data.channel")
def channels(job: TrainingJob) -> Iterator[Said]:
    """Names are unique, each channel has one source, and the code is among them."""
    names = Counter(channel["ChannelName"] for channel in job.channels)
    for name, count in names.items():
        if count > 1:
            yield Said(f"{count} input channels are called {name!r}", "choose another name")
    for channel in job.channels:
        if len(channel["DataSource"]) != 1:
            yield Said(f"channel {channel['ChannelName']!r} needs exactly one data source")
    for needed in (CODE_CHANNEL, job.plan.recipe.data.channel):
        if needed not in names:
            yield Said(f"no input channel is called {needed!r}, which the container reads")


@job_rule("channel_groups", "data.channel")
def channel_groups(job: TrainingJob) -> Iterator[Said]:
    """Once one channel names instance groups, all must, and only groups that exist."""
    known = {group["InstanceGroupName"] for group in job.groups}
    assigned = [c["ChannelName"] for c, source in job.s3_sources() if source.get("InstanceGroupNames")]
    for channel, source in job.s3_sources():
        unknown = set(source.get("InstanceGroupNames", [])) - known
        if unknown:
            yield Said(
                f"channel {channel['ChannelName']!r} names unknown instance groups: {', '.join(sorted(unknown))}"
            )
        if assigned and not source.get("InstanceGroupNames"):
            yield Said(
                f"channel {assigned[0]!r} is assigned to instance groups and {channel['ChannelName']!r} is not",
                "assign all channels, or none",
            )
    if assigned and any(job.file_systems()):
        yield Said(
            "a file system channel cannot name instance groups, and other channels do: AWS may refuse the mixture",
            severity="warning",
        )


@job_rule("file_system", "env.fsx_mount_name")
def file_system(job: TrainingJob) -> Iterator[Said]:
    """FSx for Lustre: through a VPC, as files, in one subnet, below its mount name (guide: access training data)."""
    for channel, source in job.file_systems():
        name = channel["ChannelName"]
        if not job.subnets:
            yield Said(f"channel {name!r} is a file system, which needs VpcConfig", where="env.subnets")
        if len(job.subnets) > 1:
            yield Said(
                f"channel {name!r} is a file system of one availability zone, but there are {len(job.subnets)} subnets",
                "name the file system's own subnet alone",
                where="env.subnets",
            )
        if channel.get("InputMode", "File") != "File":
            yield Said(f"channel {name!r} is a file system: InputMode must be File", where="data.input_mode")
        if source["FileSystemType"] == "FSxLustre" and not re.match(r"/[a-z0-9]{1,8}(/|$)", source["DirectoryPath"]):
            yield Said(
                f"channel {name!r}: DirectoryPath {source['DirectoryPath']!r} must start with /<mount name>",
                "LustreConfiguration.MountName in `aws fsx describe-file-systems`",
            )
        shared = job.plan.recipe.checkpoint.storage == "shared"
        if shared and name == job.plan.recipe.data.channel and source["FileSystemAccessMode"] != "rw":
            yield Said(f"channel {name!r} holds the checkpoints and is mounted read-only", where="checkpoint.storage")


@job_rule("fast_file", "data.input_mode")
def fast_file(job: TrainingJob) -> Iterator[Said]:
    """FastFile streams whole prefixes of S3, uncompressed (guide: access training data)."""
    for channel, source in job.s3_sources():
        if channel.get("InputMode", job.request["AlgorithmSpecification"]["TrainingInputMode"]) != "FastFile":
            continue
        if source["S3DataType"] != "S3Prefix":
            yield Said(f"channel {channel['ChannelName']!r}: FastFile reads S3Prefix only, not {source['S3DataType']}")
        elif not source["S3Uri"].endswith("/"):
            yield Said(
                f"channel {channel['ChannelName']!r}: FastFile needs a whole folder, and {source['S3Uri']} also begins "
                "the names of its siblings",
                f"write {source['S3Uri']}/",
                where="data.uri",
            )
        if channel.get("CompressionType", "None") != "None":
            yield Said(f"channel {channel['ChannelName']!r}: FastFile does not decompress")


@job_rule("sharded_by_key", "data.uri")
def sharded_by_key(job: TrainingJob) -> Iterator[Said]:
    """ShardedByS3Key gives each host some of the objects (and needs one a host); the loader wants all of them."""
    for channel, source in job.s3_sources():
        if source.get("S3DataDistributionType") == "ShardedByS3Key":
            yield Said(
                f"channel {channel['ChannelName']!r} gives each host only some of the objects, but every rank reads "
                "any sample",
                "FullyReplicated",
            )


@job_rule("network_isolation", "target.network_isolation", severity="warning")
def network_isolation(job: TrainingJob) -> Iterator[Said]:
    """An isolated container reaches nothing: no package index, no tracker, no SSM."""
    if not job.isolated:
        return
    if job.remote_debug:
        yield Said(
            "remote debugging goes through SSM, which an isolated container cannot reach",
            "set target.remote_debug=false, or target.network_isolation=false",
            severity="error",
        )
    online = {"WANDB_MODE": ("offline", "disabled"), "HF_HUB_OFFLINE": ("1",)}
    for name in job.environment:
        family = next((k for k in online if name.startswith(k.split("_")[0] + "_")), None)
        if family and job.environment.get(family) not in online[family]:
            yield Said(
                f"{name} speaks of a service that an isolated container cannot reach",
                f"set target.environment.{family}={online[family][0]}",
                where=f"target.environment.{name}",
            )
            break


@job_rule("encrypted_efa", "target.encrypt_inter_container_traffic", severity="warning")
def encrypted_efa(job: TrainingJob) -> Iterator[Said]:
    """Guide: protect communications between instances; encryption slows distributed training down."""
    if job.request.get("EnableInterContainerTrafficEncryption") and job.crosses_efa:
        yield Said(
            "encrypted traffic between hosts makes training over EFA much slower", "a VPC of its own isolates it"
        )


@job_rule("efa_subnet", "env.subnets")
def efa_subnet(job: TrainingJob) -> Iterator[Said]:
    """EFA does not leave its subnet (EC2 guide: Elastic Fabric Adapter)."""
    if job.crosses_efa and len(job.subnets) > 1:
        yield Said(
            f"hosts that talk over EFA must share one subnet, and there are {len(job.subnets)}: "
            f"{', '.join(job.subnets)}",
            "name the one with the capacity",
        )


@job_rule("remote_debug", "target.remote_debug", severity="info")
def remote_debug(job: TrainingJob) -> Iterator[Said]:
    """Guide: access a training container through AWS Systems Manager."""
    if job.remote_debug:
        yield Said(
            "the job's role needs ssmmessages:CreateControlChannel, CreateDataChannel, OpenControlChannel and "
            "OpenDataChannel; who connects needs ssm:StartSession"
        )


@job_rule("region_of_keys_and_buckets", "env.region")
def region_of_keys_and_buckets(job: TrainingJob) -> Iterator[Said]:
    """Keys and checkpoints must be in the job's region. A key's ARN says where it is, a bucket's name may."""
    keys = (job.request["OutputDataConfig"].get("KmsKeyId", ""), job.resources.get("VolumeKmsKeyId", ""))
    for arn in dict.fromkeys(keys):
        for said in wrong_place(job.plan, "the KMS key", arn, own_account=False):
            yield Said(said.message, "use a key of the job's region", where="env.kms_key_id")
    uri = job.request.get("CheckpointConfig", {}).get("S3Uri", "")
    bucket = uri.removeprefix("s3://").split("/")[0]
    others = [r for r in regions() if r != job.plan.recipe.env.region and re.search(rf"(^|-){r}(-|$)", bucket)]
    if others:
        yield Said(
            f"the checkpoints' bucket {bucket} seems to be in {others[0]}, the job is in {job.plan.recipe.env.region}",
            "use a bucket of the job's region",
            where="checkpoint.s3_uri",
            severity="warning",
        )


@job_rule("role", "env.role_arn")
def role(job: TrainingJob) -> Iterator[Said]:
    """SageMaker passes roles of the caller's own account only (IAM guide: PassRole)."""
    yield from wrong_place(job.plan, "the role", job.request["RoleArn"])


@job_rule("express_key", "env.kms_key_id")
def express_key(job: TrainingJob) -> Iterator[Said]:
    """S3 Express One Zone takes no key of the customer's for output (model)."""
    output = job.request["OutputDataConfig"]
    bucket = output["S3OutputPath"].removeprefix("s3://").split("/")[0]
    if bucket.endswith("--x-s3") and output.get("KmsKeyId"):
        yield Said(f"output to the S3 Express bucket {bucket} cannot have a KMS key", "use a general purpose bucket")


@job_rule("image_or_algorithm", "target.image")
def image_or_algorithm(job: TrainingJob) -> Iterator[Said]:
    """One of the two (model); and the image's registry in the job's region spares a transfer on every host."""
    algorithm = job.request.get("AlgorithmSpecification", {})
    if ("TrainingImage" in algorithm) == ("AlgorithmName" in algorithm):
        yield Said("AlgorithmSpecification needs exactly one of TrainingImage and AlgorithmName")
    region = re.match(r"\d{12}\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.", algorithm.get("TrainingImage", ""))
    if region and region.group(1) != job.plan.recipe.env.region:
        yield Said(
            f"the image is in {region.group(1)}, the job in {job.plan.recipe.env.region}; SageMaker pulls from its own "
            "region",
            f"push the image to {job.plan.recipe.env.region}",
        )


@job_rule("entrypoint", "target.image")
def entrypoint(job: TrainingJob) -> Iterator[Said]:
    """A shell as PID 1 swallows SIGTERM, so that a stop or a spot reclaim loses the work since the last checkpoint."""
    command = job.request.get("AlgorithmSpecification", {}).get("ContainerEntrypoint", [])
    if not command:
        yield Said("ContainerEntrypoint is missing: the image's own entry point swallows SIGTERM")
    elif command[0].rsplit("/", 1)[-1] in SHELLS:
        yield Said(f"ContainerEntrypoint starts with the shell {command[0]}, which swallows SIGTERM", "start python3")


@job_rule("checkpoint_folder", "checkpoint.path")
def checkpoint_folder(job: TrainingJob) -> Iterator[Said]:
    """Checkpoints outlive a host only where the platform keeps them: the synced folder, or a file system."""
    checkpoint = job.plan.recipe.checkpoint
    local = job.request.get("CheckpointConfig", {}).get("LocalPath", "/opt/ml/checkpoints").rstrip("/")
    if checkpoint.storage == "per_host" and not f"/opt/ml/{checkpoint.path}/".startswith(f"{local}/"):
        yield Said(f"/opt/ml/{checkpoint.path} is not in {local}, the only folder that SageMaker keeps", "checkpoints")
    if checkpoint.storage == "shared":
        folders = [f"input/data/{channel['ChannelName']}/" for channel, _ in job.file_systems()]
        if not folders:
            yield Said(
                "checkpoint.storage=shared needs a folder that every host sees, and the job mounts no file system",
                "use data=fsx, or checkpoint=per_host",
                where="checkpoint.storage",
            )
        elif not f"{checkpoint.path}/".startswith(tuple(folders)):
            yield Said(f"{checkpoint.path} is on no file system", f"a folder below {folders[0]}")
        elif "{run_id}" not in checkpoint.path:
            yield Said(
                f"{checkpoint.path} has no {{run_id}}: every run would go on from the same checkpoints",
                severity="warning",
            )


@job_rule("environment", "target.environment")
def environment(job: TrainingJob) -> Iterator[Said]:
    """No secrets."""
    for name, value in job.environment.items():
        kind = scan_variable(name, value)
        if kind:
            yield Said(
                f"{name} holds a secret ({kind})",
                "keep it in Secrets Manager and pass its ARN",
                where=f"target.environment.{name}",
            )


@job_rule("tags", "env.tags")
def tags(job: TrainingJob) -> Iterator[Said]:
    """Keys are unique and not AWS's own (guide: tagging)."""
    keys = [tag["Key"] for tag in job.request.get("Tags", [])]
    for key, count in Counter(keys).items():
        if count > 1:
            yield Said(f"tag {key!r} stands {count} times")
        if key.lower().startswith("aws:"):
            yield Said(f"tag {key!r}: keys that start with aws: are AWS's own", "choose another key")
    for key in job.plan.recipe.env.tags:
        if key.startswith("chimera:"):
            yield Said(f"tag {key!r}: keys that start with chimera: are set by the launcher", "choose another key")


@job_rule("fi_provider", "target.environment", severity="warning")
def fi_provider(job: TrainingJob) -> Iterator[Said]:
    """FI_PROVIDER=efa on a type without EFA makes NCCL hang at start-up."""
    without = [facts.type for facts in job.instances if not facts.efa_interfaces]
    if job.environment.get("FI_PROVIDER") == "efa" and without:
        yield Said(
            f"FI_PROVIDER=efa, but {', '.join(without)} have no EFA",
            "leave it out: the image finds EFA by itself",
            where="target.environment.FI_PROVIDER",
        )
