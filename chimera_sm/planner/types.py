"""What a plan says. Later work adds fields and renames none: `schema_version` counts the additions.

None means unknown, everywhere: an unknown price, a memory that nothing predicts. It prints as "unknown", never as 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from chimera_sm.recipe.schema import Recipe
from chimera_train.config import BatchPlan, MeshLayout, encode

PLAN_SCHEMA_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """What a prediction is worth: its 10th, 50th and 90th percentile."""

    p10: float
    p50: float
    p90: float


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One job. A run longer than one job may last is a list of them over one checkpoint prefix."""

    index: int
    start_step: int
    num_steps: int
    max_run_s: int
    max_wait_s: int | None
    """Spot only."""


@dataclass(frozen=True, kw_only=True)
class InstancePlan:
    """One ordered choice of machines, with the catalogue's facts."""

    type: str
    count: int
    role: Literal["group", "fallback"]
    """`group`: part of the job; `fallback`: taken instead where a group has no capacity."""
    accelerator: str | None
    accelerators_per_host: int
    workers_per_host: int
    accelerator_memory_gib: float | None
    peak_tflops: float | None
    """Dense bf16, of one accelerator."""
    efa_interfaces: int
    network_gbps: float | None
    nvme_gb: float
    """0: none; the job gets an EBS volume."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Peak memory of one accelerator of the most loaded rank, in GiB, by component."""

    rank: int
    components_gib: dict[str, float]
    """parameters, gradients, optimizer, activations, logits, gathered_parameters, overhead."""
    total_gib: float
    capacity_gib: float | None
    fits: bool | None


@dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """Time of one optimizer step, in seconds, by component (compute, tensor_parallel, fully_sharded, pipeline_bubble,
    optimizer, …). `basis` says how it was predicted."""

    components_s: dict[str, float]
    total_s: float | None
    tokens_per_s: float | None
    tokens_per_s_per_accelerator: float | None
    mfu: float | None
    """6 N + 12 L h s FLOPs a token (no credit for recomputation), over the dense bf16 peak."""
    flops_per_token: float
    basis: str


@dataclass(frozen=True, kw_only=True)
class CostEstimate:
    """The whole run at one kind of capacity."""

    kind: Literal["on_demand", "spot", "savings_plan", "reserved", "capacity_block"]
    """`reserved`: a SageMaker training plan; `capacity_block`: EC2's."""
    chosen: bool
    usd_per_hour: float | None
    """Of all hosts together."""
    price_basis: str
    """Source and date of the price, or why it is unknown."""
    usd: Distribution | None
    days: Distribution | None
    would_finish: bool | None = None
    """False: not even at the median rate of interruptions. None: no step time to tell by. True without `days`: only
    the 90th percentile would not."""
    service: Literal["ec2", "training_job", "hyperpod"] | None = None
    """Whose price it is; None on this machine."""


@dataclass(frozen=True, kw_only=True)
class CostPart:
    """One thing that the run pays for."""

    name: str
    """`machines`, `fsx`, `s3_checkpoints`, `s3_data`, `transfer`."""
    usd: Distribution | None
    """None is unknown; the basis says why."""
    basis: str


@dataclass(frozen=True, kw_only=True)
class TotalCost:
    """The machines of the chosen kind of capacity, and what the run stores and moves."""

    parts: tuple[CostPart, ...]
    usd: Distribution | None
    """None where a part is unknown: `known_usd` is then no total."""
    known_usd: Distribution | None
    """Sum of the parts that are known."""
    unknown: tuple[str, ...]
    """Names of those that are not."""


@dataclass(frozen=True, kw_only=True)
class ReliabilityEstimate:
    failures_per_day: float | None
    """Of hardware, all hosts together."""
    failures_expected: float | None
    """Over the run."""
    spot_interruption_bucket: str | None
    """The spot advisor's monthly bucket for the type and region."""
    checkpoint_interval_steps: int
    recommended_interval_steps: int | None
    """By Daly's formula; None where no step time is known."""
    basis: str
    failures: Distribution | None = None
    """Over the run: the error of the rate and chance together."""
    reclaims_per_day: float | None = None
    """Of spot, all hosts together; 0 for other capacity, None where unknown."""
    reclaims_expected: float | None = None
    young_interval_steps: int | None = None
    """Young's sqrt(2 C M), of which Daly's is the higher order."""
    effective_share: float | None = None
    """Computing over running time, of a job that is running; None where that is unknown or the run would not finish."""


@dataclass(frozen=True, kw_only=True)
class DiskBudget:
    """What must fit on a host's disk, in GB (10^9 bytes)."""

    checkpoint_gb: float
    """One checkpoint of the whole model with its optimizer states."""
    checkpoints_on_disk_gb: float
    """Largest sum on one host: after a restore, SageMaker puts every host's files on every host."""
    data_gb: float | None
    model_gb: float
    available_gb: float | None
    fits: bool | None


@dataclass(frozen=True, kw_only=True)
class FallbackEstimate:
    """What becomes of the job where it gets a fallback instead of its first choice."""

    index: int
    """In `instances.fallbacks`."""
    type: str
    memory: MemoryEstimate
    disk: DiskBudget
    step: StepEstimate
    num_jobs: int | None
    """Jobs of the whole run, all of them on this type; None where the run's length is unknown."""


@dataclass(frozen=True, kw_only=True)
class JobLength:
    """What one job must get done before its limit, in seconds."""

    startup_s: float
    """Until the first step."""
    save_s: float
    """That training stands still for one save."""
    step_s: float | None
    """One step, undisturbed; None where it is not predicted."""
    limit_s: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A recipe, the catalogue's facts about it, and predictions."""

    recipe: Recipe
    recipe_hash: str
    num_parameters: int
    num_active_parameters: int
    """Parameters that one token passes through (all of them in a dense model)."""
    layout: MeshLayout
    batch: BatchPlan
    instances: tuple[InstancePlan, ...]
    segments: tuple[Segment, ...]
    memory: MemoryEstimate
    step: StepEstimate
    costs: tuple[CostEstimate, ...]
    reliability: ReliabilityEstimate
    disk: DiskBudget
    catalog_version: str
    fallbacks: tuple[FallbackEstimate, ...] = ()
    job_length: JobLength | None = None
    """None on this machine, where a job has no limit."""
    other_services: tuple[CostEstimate, ...] = ()
    """What the same run would cost by the hour elsewhere: EC2, a training job, HyperPod, without the plan's own."""
    total: TotalCost | None = None
    """None on this machine."""
    notes: tuple[str, ...] = ()
    """Assumptions a reader should know."""
    schema_version: int = field(default=PLAN_SCHEMA_VERSION)

    def to_json(self) -> dict[str, Any]:
        """Plain data, stable keys."""
        data: dict[str, Any] = encode(self)
        return data
