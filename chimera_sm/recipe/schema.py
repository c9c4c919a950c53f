"""The whole recipe: what the trainer reads (`chimera_train.config`) and what only the launching side knows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar, get_args

from chimera_train.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    Problem,
    ProfilingConfig,
    TrainConfig,
    TrainRecipe,
    sha256_of,
)
from chimera_train.config.contract import FAULT_VARIABLE, MODEL_CHANNEL, is_reserved_variable
from chimera_train.config.data import MAX_TRAINED_VOCAB_SIZE, MIN_TRAINED_VOCAB_SIZE
from chimera_train.config.decode import fields_of
from chimera_train.config.fault import parse_fault
from chimera_train.config.sizes import oversized

Base = TypeVar("Base")
LOCAL = "local"
"""The instance type that means this machine."""


@dataclass(frozen=True, kw_only=True)
class LaunchModelConfig(ModelConfig):
    """Where a model in Hugging Face's format comes from, if it does."""

    path: str | None = None
    """Folder of this machine with a config.json, which fills the section where the recipe sets nothing (`model=hf`)."""
    weights_uri: str | None = None
    """Where a job finds the model's files, for train.initial_weights: an S3 prefix, or a folder (/…) of the file system
    in `env.fsx_*`. They become the input channel `model`."""

    def validate(self) -> list[Problem]:
        problems = super().validate() + _empty("model", self)
        if self.weights_uri and not re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?|/.+", self.weights_uri):
            problems.append(
                Problem(
                    "model.weights_uri",
                    f"{self.weights_uri!r} is no S3 URI and no absolute path",
                    "write s3://bucket/prefix/, or /folder of the file system",
                )
            )
        return problems


@dataclass(frozen=True, kw_only=True)
class LaunchDataConfig(DataConfig):
    """Where the shards come from."""

    location: Literal["stdlib", "local", "s3", "fsx"]
    """`stdlib`: the source code of the running Python's standard library, prepared on this machine;
    `local`: a folder of this machine (`uri`); `s3`: a prefix (`uri`), one channel; `fsx`: a folder (`uri`) of the
    file system in `env.fsx_*`, mounted for reading and writing."""
    uri: str | None = None
    input_mode: Literal["File", "FastFile"] = "FastFile"
    """`s3` only: copy everything first, or stream."""
    size_gb: float | None = None
    """Size of the shards in GB, for the disk budget; null is unknown."""
    vocab_size: int | None = None
    """Vocabulary of the tokenizer that made the shards; null is not checked before the start."""
    region: str | None = None
    """Where the shards are now, for the price of copying them to `env.region` once; null: they are there."""

    def validate(self) -> list[Problem]:
        problems = super().validate() + _empty("data", self)
        if self.region is not None and self.location not in ("s3", "fsx"):
            problems.append(
                Problem(
                    "data.region", f"{self.region} would be ignored by data.location={self.location}", "leave it out"
                )
            )
        if self.size_gb is not None and self.size_gb < 0:
            problems.append(Problem("data.size_gb", f"{self.size_gb} is negative", "null is unknown"))
        if self.location != "stdlib" and not self.uri:
            problems.append(Problem("data.uri", f"is required by data.location={self.location}"))
        if (
            self.location == "s3"
            and self.uri
            and not re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?", self.uri)
        ):
            problems.append(Problem("data.uri", f"{self.uri!r} is no S3 URI", "write s3://bucket/prefix/"))
        if self.location == "fsx" and self.uri and not self.uri.startswith("/"):
            problems.append(Problem("data.uri", f"{self.uri!r} is not absolute", f"write /{self.uri}"))
        return problems


@dataclass(frozen=True, kw_only=True)
class LaunchCheckpointConfig(CheckpointConfig):
    s3_uri: str | None = None
    """Where SageMaker keeps /opt/ml/checkpoints; `{run_id}` is replaced by the run's id, and null is
    `s3://<env.bucket>/chimera/runs/{run_id}/checkpoints`. Every attempt of a run uses the same one."""

    def validate(self) -> list[Problem]:
        problems = super().validate() + _empty("checkpoint", self)
        if self.s3_uri and not self.s3_uri.startswith("s3://"):
            problems.append(Problem("checkpoint.s3_uri", f"{self.s3_uri!r} is no S3 URI", "write s3://bucket/prefix"))
        return problems


@dataclass(frozen=True, kw_only=True)
class InstanceChoice:
    type: str
    """`ml.p5.48xlarge`, or `local`."""
    count: int


@dataclass(frozen=True, kw_only=True)
class InstancesConfig(InstanceChoice):
    """The machines, and in which order others are taken instead."""

    name: str
    fallbacks: tuple[InstanceChoice, ...] = ()
    """Tried in this order where the first choice has no capacity (SageMaker's InstancePreferences: on-demand only)."""
    workers_per_host: int | None = None
    """Training processes a host; null: one an accelerator."""
    volume_gb: int = 100
    """EBS volume; ignored by types with NVMe disks."""

    def validate(self) -> list[Problem]:
        problems = []
        for key, choice in [
            ("instances", self),
            *((f"instances.fallbacks[{i}]", f) for i, f in enumerate(self.fallbacks)),
        ]:
            if choice.count < 1:
                problems.append(Problem(f"{key}.count", f"{choice.count} is not positive"))
            if choice.type != LOCAL and not choice.type.startswith("ml."):
                problems.append(
                    Problem(
                        f"{key}.type",
                        f"{choice.type!r} is no SageMaker instance type",
                        f"did you mean ml.{choice.type}?" if "." in choice.type else "e.g. ml.p5.48xlarge",
                    )
                )
        if self.workers_per_host is not None and self.workers_per_host < 1:
            problems.append(Problem("instances.workers_per_host", f"{self.workers_per_host} is not positive"))
        if self.type == LOCAL and self.workers_per_host is None:
            problems.append(Problem("instances.workers_per_host", "is required by instances.type=local"))
        if self.volume_gb < 1:
            problems.append(Problem("instances.volume_gb", f"{self.volume_gb} is not positive"))
        if len(self.fallbacks) > 4:
            problems.append(Problem("instances.fallbacks", f"{len(self.fallbacks)} of them; SageMaker takes at most 4"))
        return problems


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """What a team's own fleet has shown; the planner's failure rate is updated by it. The default says nothing."""

    count: int = 0
    """Jobs that a host's failure stopped. Reclaims of spot and planned maintenance are not counted."""
    node_hours: float = 0.0
    """Hours that were observed, over all hosts of eight accelerators (of other hosts: accelerator-hours / 8)."""

    def validate(self) -> list[Problem]:
        key = "capacity.failures"
        if self.count < 0:
            return [Problem(f"{key}.count", f"{self.count} is negative", "0 leaves the rate to published fleets")]
        if self.node_hours < 0:
            return [Problem(f"{key}.node_hours", f"{self.node_hours:g} is negative", "hosts × hours of counting")]
        if self.count and not self.node_hours:
            message = f"is required by {key}.count={self.count}: a count without a time is no rate"
            return [Problem(f"{key}.node_hours", message, "hosts × hours in which they were counted")]
        return []


@dataclass(frozen=True, kw_only=True)
class CapacityConfig:
    kind: Literal["on_demand", "spot", "reserved"]
    max_run_hours: float = 24.0
    """Longest one job may run; a longer run is cut into segments over one checkpoint prefix. SageMaker's limit: 672."""
    max_wait_hours: float | None = None
    """`spot` only, and required there: running and waiting for capacity together; at least `max_run_hours`."""
    max_pending_hours: float | None = None
    """Give up when capacity has not come after this long (0.5 to 672)."""
    training_plan_arn: str | None = None
    """`reserved` only, and required there."""
    keep_alive_minutes: int = 0
    """Keep the machines warm after the job, 0 to 360; not with spot."""
    max_retries: int = 0
    """Of SageMaker, after InternalServerError (0 to 30)."""
    failures: FailureRecord = FailureRecord()
    """The fleet's own counts, e.g. `capacity.failures.count=3 capacity.failures.node_hours=20000`."""

    def validate(self) -> list[Problem]:
        problems = self.failures.validate()
        if not 0 < self.max_run_hours <= 672:
            problems.append(
                Problem(
                    "capacity.max_run_hours", f"{self.max_run_hours} is not in (0, 672]", "28 days is SageMaker's limit"
                )
            )
        if self.max_pending_hours is not None and not 0.5 <= self.max_pending_hours <= 672:
            problems.append(Problem("capacity.max_pending_hours", f"{self.max_pending_hours} is not in [0.5, 672]"))
        if self.kind == "spot":
            if self.max_wait_hours is None:
                problems.append(
                    Problem(
                        "capacity.max_wait_hours",
                        "is required by capacity.kind=spot",
                        f"set it to {self.max_run_hours:g} or more",
                    )
                )
            elif self.max_wait_hours < self.max_run_hours:
                problems.append(
                    Problem(
                        "capacity.max_wait_hours",
                        f"{self.max_wait_hours:g} is below capacity.max_run_hours={self.max_run_hours:g}",
                        "it counts running and waiting together",
                    )
                )
            if self.keep_alive_minutes:
                problems.append(
                    Problem(
                        "capacity.keep_alive_minutes", "warm pools do not go with capacity.kind=spot", "set it to 0"
                    )
                )
        elif self.max_wait_hours is not None:
            problems.append(
                Problem(
                    "capacity.max_wait_hours",
                    f"is only for capacity.kind=spot, not {self.kind}",
                    "set it to null",
                    no_effect=True,
                )
            )
        if (self.kind == "reserved") != (self.training_plan_arn is not None):
            problems.append(
                Problem(
                    "capacity.training_plan_arn",
                    "capacity.kind=reserved and a training plan go together, one is missing",
                    no_effect=self.kind != "reserved",
                )
            )
        if not 0 <= self.keep_alive_minutes <= 360:
            problems.append(Problem("capacity.keep_alive_minutes", f"{self.keep_alive_minutes} is not in [0, 360]"))
        if not 0 <= self.max_retries <= 30:
            problems.append(Problem("capacity.max_retries", f"{self.max_retries} is not in [0, 30]"))
        return problems


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """What runs the job."""

    name: Literal["local", "sagemaker"]
    image: str | None = None
    """Training image; null: the AWS deep learning container for `framework_version` in the region."""
    framework_version: str = "2.13"
    """PyTorch version of the default image."""
    network_isolation: bool = False
    encrypt_inter_container_traffic: bool = False
    infra_check: bool = True
    """SageMaker checks the machines before the start."""
    remote_debug: bool = False
    grace_s: float = 120.0
    """Seconds between SIGTERM and SIGKILL. SageMaker's is 120; the local target obeys it."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables of the container. Secrets do not belong here."""

    def validate(self) -> list[Problem]:
        problems = _empty("target", self)
        if self.grace_s <= 0:
            problems.append(Problem("target.grace_s", f"{self.grace_s} is not positive"))
        elif self.name == "sagemaker" and self.grace_s != 120:
            problems.append(Problem("target.grace_s", f"{self.grace_s:g} cannot be set on SageMaker, which gives 120"))
        for name in self.environment:
            if is_reserved_variable(name):
                problems.append(
                    Problem(
                        f"target.environment.{name}", "is set by the launcher for every host or worker", "leave it out"
                    )
                )
        if fault := self.environment.get(FAULT_VARIABLE):
            try:
                parse_fault(fault)
            except ValueError as error:
                key = f"target.environment.{FAULT_VARIABLE}"
                problems.append(Problem(key, str(error).removeprefix(f"{FAULT_VARIABLE}=")))
        return problems


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """A team's account, in a file of its own. Values that are null offline become placeholders in a dry run."""

    name: str = "default"
    region: str
    account_id: str | None = None
    role_arn: str | None = None
    bucket: str | None = None
    """For code, checkpoints and output."""
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    kms_key_id: str | None = None
    """Encrypts code, output and volumes."""
    fsx_file_system_id: str | None = None
    fsx_mount_name: str | None = None
    """`aws fsx describe-file-systems` shows it as LustreConfiguration.MountName."""
    fsx_tier: str | None = None
    """For its price: deployment type and MB/s per TiB, e.g. `PERSISTENT_2-250`; null is unknown."""
    fsx_capacity_gib: int | None = None
    """For its price: StorageCapacity of the file system; null is unknown."""
    tags: dict[str, str] = field(default_factory=dict)

    def validate(self) -> list[Problem]:
        problems = _empty("env", self)
        if self.account_id is not None and not re.fullmatch(r"\d{12}", self.account_id):
            problems.append(Problem("env.account_id", f"{self.account_id!r} is not twelve digits", "quote it in YAML"))
        if self.role_arn is not None and not re.fullmatch(r"arn:aws[a-z-]*:iam::\d{12}:role/.+", self.role_arn):
            problems.append(
                Problem("env.role_arn", f"{self.role_arn!r} is no IAM role ARN", "arn:aws:iam::<account>:role/<name>")
            )
        if self.bucket is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", self.bucket):
            problems.append(
                Problem("env.bucket", f"{self.bucket!r} is no bucket name", "the name alone, without s3:// and prefix")
            )
        if self.fsx_capacity_gib is not None and self.fsx_capacity_gib < 1200:
            problems.append(
                Problem(
                    "env.fsx_capacity_gib",
                    f"{self.fsx_capacity_gib} is below 1200, FSx for Lustre's smallest",
                    "null is unknown",
                )
            )
        # AWS's own patterns for these take any word, and the job fails when it starts.
        for key, prefix in (("subnets", "subnet"), ("security_groups", "sg")):
            for index, value in enumerate(getattr(self, key)):
                if not re.fullmatch(rf"{prefix}-[0-9a-f]{{8,17}}", value):
                    problems.append(Problem(f"env.{key}[{index}]", f"{value!r} is no id of the form {prefix}-…"))
        return problems


@dataclass(frozen=True, kw_only=True)
class CodeConfig:
    """What travels to the machines beside the trainer."""

    path: str | None = None
    """A folder of your own, importable by the workers; its .gitignore and .chimeraignore are honoured."""
    max_size_mb: float = 64.0

    def validate(self) -> list[Problem]:
        problems = _empty("code", self)
        if self.max_size_mb <= 0:
            problems.append(Problem("code.max_size_mb", f"{self.max_size_mb} is not positive"))
        return problems


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The composed and validated recipe. `compose` makes one; it never changes afterwards."""

    name: str
    description: str = ""
    model: LaunchModelConfig
    parallel: ParallelConfig
    train: TrainConfig
    data: LaunchDataConfig
    optim: OptimConfig
    precision: PrecisionConfig
    checkpoint: LaunchCheckpointConfig
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    instances: InstancesConfig
    capacity: CapacityConfig
    target: TargetConfig
    env: EnvConfig
    code: CodeConfig = field(default_factory=CodeConfig)

    @property
    def origins(self) -> Mapping[str, str]:
        """Dotted key → "file:line" or the override that set it; empty for a recipe that was not composed."""
        return getattr(self, "_origins", {})

    def with_origins(self, origins: Mapping[str, str]) -> Recipe:
        """Not a field: two recipes with equal values are equal, wherever the values came from."""
        object.__setattr__(self, "_origins", origins)
        return self

    @property
    def train_recipe(self) -> TrainRecipe:
        """The trainer's part."""
        return TrainRecipe(
            name=self.name,
            model=_narrow(ModelConfig, self.model),
            parallel=self.parallel,
            train=self.train,
            data=_narrow(DataConfig, self.data),
            optim=self.optim,
            precision=self.precision,
            checkpoint=_narrow(CheckpointConfig, self.checkpoint),
            evaluation=self.evaluation,
            profiling=self.profiling,
        )

    @property
    def hash(self) -> str:
        """SHA-256 (hex) of the canonical JSON of every value."""
        return sha256_of(self)

    def validate(self) -> list[Problem]:
        """Every broken rule that needs neither the catalogue nor the world size."""
        problems = oversized(self)
        if problems:
            return problems
        problems = self.train_recipe.validate()
        problems += self._weights_problems()
        for section in (
            self.model,
            self.data,
            self.checkpoint,
            self.instances,
            self.capacity,
            self.target,
            self.env,
            self.code,
        ):
            problems += [p for p in section.validate() if p not in problems]
        if not re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9])*", self.name) or len(self.name) > 40:
            problems.append(Problem("name", f"{self.name!r} is not 1 to 40 letters, digits and inner hyphens"))
        if (self.target.name == "local") != (self.instances.type == LOCAL):
            problems.append(
                Problem(
                    "instances.type",
                    f"{self.instances.type} does not go with target={self.target.name}",
                    "instances=local goes with target=local, and only there",
                )
            )
        if self.target.name == "local" and self.data.location in ("s3", "fsx"):
            problems.append(
                Problem(
                    "data.location",
                    f"{self.data.location} cannot be read by target=local",
                    "use data=stdlib, or data=local data.uri=FOLDER",
                )
            )
        if self.target.name != "local" and self.data.location in ("stdlib", "local"):
            problems.append(
                Problem(
                    "data.location",
                    f"{self.data.location} is on this machine only; target={self.target.name} cannot read it",
                    "use data=s3 or data=fsx",
                )
            )
        if self.data.vocab_size is not None and self.data.vocab_size > self.model.vocab_size:
            problems.append(
                Problem(
                    "model.vocab_size",
                    f"{self.model.vocab_size} is smaller than the tokenizer's data.vocab_size={self.data.vocab_size}",
                )
            )
        elif self.data.location == "stdlib":
            problems += self._trained_tokenizer_problems()
        return problems

    def _trained_tokenizer_problems(self) -> list[Problem]:
        """Of the corpus that is prepared on this machine, whose tokenizer has the vocabulary that the recipe says."""
        size = self.data.vocab_size or self.model.vocab_size
        key = "model.vocab_size" if size == self.model.vocab_size else "data.vocab_size"
        tokenizer = "the tokenizer that is trained on data.location=stdlib"
        if 0 < size < MIN_TRAINED_VOCAB_SIZE:
            message = f"{size} is too small for {tokenizer}: 256 bytes and the end of a document"
            return [Problem(key, message, f"use {MIN_TRAINED_VOCAB_SIZE} or more")]
        if size > MAX_TRAINED_VOCAB_SIZE:
            message = f"{size} is too large for {tokenizer}"
            return [Problem(key, message, f"use {MAX_TRAINED_VOCAB_SIZE} or less")]
        return []

    def _weights_problems(self) -> list[Problem]:
        """Whether train.initial_weights is where this target has something."""
        weights, uri = self.train.initial_weights, self.model.weights_uri
        channel = weights.split("/")[0] if weights is not None else None
        if self.target.name == "local":
            if uri is not None:
                return [Problem("model.weights_uri", f"{uri} would be ignored by target=local", "leave it out")]
            if channel not in (None, "", self.data.channel):
                return [
                    Problem(
                        "train.initial_weights",
                        f"{weights} is in no input channel of target=local",
                        "give an absolute path",
                    )
                ]
            return []
        if uri is not None and channel != MODEL_CHANNEL:
            return [
                Problem(
                    "model.weights_uri",
                    f"{uri} would be ignored: train.initial_weights={weights} is not in the channel {MODEL_CHANNEL!r}",
                    f"set train.initial_weights={MODEL_CHANNEL}, or leave it out",
                )
            ]
        if channel == MODEL_CHANNEL != self.data.channel and uri is None:
            return [
                Problem("model.weights_uri", f"is required by train.initial_weights={weights}", "s3://bucket/prefix/")
            ]
        if channel not in (None, "", MODEL_CHANNEL, self.data.channel):
            return [
                Problem(
                    "train.initial_weights",
                    f"{weights} is in no input channel: there are {self.data.channel} and, with model.weights_uri, "
                    f"{MODEL_CHANNEL}",
                )
            ]
        return []


def _empty(key: str, section: Any) -> list[Problem]:
    """Text that is there and says nothing: it would silently mean "none"."""
    return [
        Problem(f"{key}.{name}", "is empty", "null leaves it out")
        for name, kind in fields_of(section.__class__).items()
        if getattr(section, name) == "" and type(None) in get_args(kind)
    ]


def _narrow(base: type[Base], value: Base) -> Base:
    """The base class's part of an extended section."""
    return base(**{f.name: getattr(value, f.name) for f in fields(base)})  # type: ignore[arg-type]
