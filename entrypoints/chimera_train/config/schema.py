"""What the trainer reads: one frozen dataclass a section, in the standard library alone.

The launching side (`chimera_sm.recipe.schema`) extends these classes with what only it knows; the container reads the
same classes back from `recipe.json`. A field's docstring stands under it and says unit, interaction and rule.
Rules over one section are in its `validate`, rules over several in `TrainRecipe.validate`; both return a list of
`Problem`, so that a user sees every error of a recipe at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Problem:
    """One broken rule: the dotted recipe key, what is wrong with which value, and what to type instead."""

    key: str
    message: str
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's frequency scaling for contexts longer than the model was first trained on."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def validate(self) -> list[Problem]:
        problems = []
        if self.factor < 1:
            problems.append(Problem("model.rope_scaling.factor", f"{self.factor} is below 1", "null does not scale"))
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            problems.append(
                Problem(
                    "model.rope_scaling.low_freq_factor",
                    f"{self.low_freq_factor} is not between 0 and high_freq_factor={self.high_freq_factor}",
                )
            )
        if self.original_max_position_embeddings < 1:
            problems.append(
                Problem(
                    "model.rope_scaling.original_max_position_embeddings",
                    f"{self.original_max_position_embeddings} is not positive",
                )
            )
        return problems


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU, dense or MoE."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Width of the SwiGLU; of one expert where `num_experts` > 0."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    """Heads of keys and values; divides `num_heads` (grouped-query attention)."""
    head_dim: int | None = None
    """None: `hidden_size / num_heads`."""
    norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 8192
    """Longest sequence, in tokens; `train.sequence_length` may not exceed it."""
    tie_embeddings: bool = False
    """The output head is the embedding's matrix."""
    num_experts: int = 0
    """0: dense."""
    experts_per_token: int = 0
    router_aux_loss_coefficient: float = 0.0
    """Weight of the load-balancing loss (Switch Transformer's form, as Mixtral uses it)."""
    initializer_range: float = 0.02
    """Standard deviation of the normal initialisation; the two projections that write to the residual stream use
    this divided by sqrt(2 * num_layers) (GPT-2)."""

    @property
    def attention_head_dim(self) -> int:
        return self.head_dim if self.head_dim is not None else self.hidden_size // self.num_heads

    def validate(self) -> list[Problem]:
        problems = []
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                problems.append(Problem(f"model.{name}", f"{getattr(self, name)} is not positive"))
        for name in ("rope_theta", "norm_eps", "initializer_range"):
            if getattr(self, name) <= 0:
                problems.append(Problem(f"model.{name}", f"{getattr(self, name)} is not positive"))
        if self.head_dim is not None and self.head_dim < 1:
            problems.append(
                Problem("model.head_dim", f"{self.head_dim} is not positive", "null: hidden_size / num_heads")
            )
        if self.router_aux_loss_coefficient < 0:
            problems.append(
                Problem("model.router_aux_loss_coefficient", f"{self.router_aux_loss_coefficient} is negative")
            )
        if self.rope_scaling is not None:
            problems += self.rope_scaling.validate()
        if problems:
            return problems
        if self.num_heads % self.num_kv_heads:
            problems.append(
                Problem(
                    "model.num_kv_heads",
                    f"{self.num_kv_heads} does not divide model.num_heads={self.num_heads}",
                    f"use one of {divisors(self.num_heads)}",
                )
            )
        if self.head_dim is None and self.hidden_size % self.num_heads:
            problems.append(
                Problem(
                    "model.num_heads",
                    f"{self.num_heads} does not divide model.hidden_size={self.hidden_size}",
                    "set model.head_dim, or a divisor of the hidden size",
                )
            )
        elif self.attention_head_dim % 2:
            problems.append(Problem("model.head_dim", f"{self.attention_head_dim} is odd; rotary positions need pairs"))
        if self.num_experts < 0 or (self.num_experts == 0) != (self.experts_per_token == 0):
            problems.append(
                Problem(
                    "model.experts_per_token",
                    f"num_experts={self.num_experts} with experts_per_token={self.experts_per_token}",
                    "set both, or neither",
                )
            )
        elif self.experts_per_token > self.num_experts:
            problems.append(
                Problem(
                    "model.experts_per_token", f"{self.experts_per_token} exceeds model.num_experts={self.num_experts}"
                )
            )
        for name in ("hidden_size", "intermediate_size"):
            if self.num_experts and getattr(self, name) % 8:
                problems.append(
                    Problem(
                        f"model.{name}",
                        f"{getattr(self, name)} is not a multiple of 8; grouped matrix products of experts want rows "
                        "of 16 bytes",
                    )
                )
        return problems


PipelineSchedule = Literal["gpipe", "1f1b", "interleaved_1f1b"]


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Degrees of parallelism. Their product over all axes is the world size:

    pipeline_parallel × data_parallel × fully_sharded × context_parallel × tensor_parallel = hosts × workers a host.
    Expert parallel reuses the fully_sharded and context axes and is no factor of its own.
    """

    data_parallel: int = 1
    """Replicas of the sharded group (hybrid sharding); 1 is plain FSDP."""
    fully_sharded: int | None = None
    """Ranks over which parameters, gradients and optimizer states are sharded. None: what the other degrees leave."""
    tensor_parallel: int = 1
    """Stays inside a host."""
    pipeline_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    pipeline_schedule: PipelineSchedule = "1f1b"
    reshard_after_forward: bool = True
    """Free the gathered parameters after forward (ZeRO-3) instead of keeping them for backward (ZeRO-2)."""
    defer_gradient_sync: bool = False
    """Keep gradients whole over the micro-batches of a step and scatter them once, in the last. Saves traffic
    (precision.reduce_dtype's bytes × parameters a micro-batch), costs memory (the same bytes, unsharded).
    False keeps a shard only. Replicas (data_parallel) are always reduced once a step."""

    def validate(self) -> list[Problem]:
        problems = []
        for name in (
            "data_parallel",
            "tensor_parallel",
            "pipeline_parallel",
            "context_parallel",
            "expert_parallel",
        ):
            if getattr(self, name) < 1:
                problems.append(Problem(f"parallel.{name}", f"{getattr(self, name)} is not a positive degree"))
        if self.fully_sharded is not None and self.fully_sharded < 1:
            problems.append(
                Problem(
                    "parallel.fully_sharded", f"{self.fully_sharded} is not a positive degree", "null takes the rest"
                )
            )
        return problems


ActivationCheckpointing = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, in what batches, and how one step is computed."""

    num_steps: int
    """Optimizer steps of the whole run, over all its segments and resumes."""
    global_batch_size: int
    """Sequences an optimizer step: micro_batch_size × data-parallel size × accumulation steps."""
    micro_batch_size: int
    """Sequences a rank holds in one forward pass."""
    sequence_length: int
    """Tokens a sequence."""
    seed: int = 1234
    """Of the initial weights and of the order of the data. The order depends on it alone, never on the world size."""
    activation_checkpointing: ActivationCheckpointing = "none"
    compile: bool = False
    """torch.compile each block."""
    loss_chunk_tokens: int = 2048
    """Logits are made and consumed for this many tokens at a time, so that they never stand whole in memory.
    0 makes them in one piece."""
    deterministic: bool = False
    """Deterministic kernels: the same bits on the same hardware, slower on GPUs."""
    log_interval: int = 1
    """Steps between metric lines."""
    collective_timeout_s: float = 600.0
    """A collective that takes longer is a hang: the worker exits non-zero so that the service repairs it."""

    def validate(self) -> list[Problem]:
        problems = [
            Problem(f"train.{name}", f"{getattr(self, name)} is not positive")
            for name in ("num_steps", "global_batch_size", "micro_batch_size", "sequence_length", "log_interval")
            if getattr(self, name) < 1
        ]
        if self.loss_chunk_tokens < 0:
            problems.append(Problem("train.loss_chunk_tokens", f"{self.loss_chunk_tokens} is negative"))
        if not 0 < self.collective_timeout_s <= 86_400:
            problems.append(
                Problem("train.collective_timeout_s", f"{self.collective_timeout_s:g} is not in (0, 86400]")
            )
        return problems


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Tokenised shards (Megatron `.bin`/`.idx` and a `dataset.json`), as `chimera_sm data prepare` writes them."""

    name: str
    channel: str = "train"
    """Input channel that holds the shards: `<ml root>/input/data/<channel>`."""
    path: str = ""
    """Folder of the shards inside the channel."""
    shuffle: bool = True
    """False: samples in the order of the corpus."""
    prefetch_batches: int = 4
    """Micro-batches that one background thread reads ahead; 0 reads in the step itself."""

    def validate(self) -> list[Problem]:
        problems = []
        if self.prefetch_batches < 0:
            problems.append(Problem("data.prefetch_batches", f"{self.prefetch_batches} is negative"))
        if self.path.startswith("/") or ".." in self.path.split("/"):
            problems.append(
                Problem("data.path", f"{self.path!r} leaves the channel", "give a folder inside the channel")
            )
        return problems


LearningRateSchedule = Literal["cosine", "wsd", "constant"]


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW with a warm-up and a decay."""

    name: Literal["adamw"] = "adamw"
    learning_rate: float
    min_learning_rate_ratio: float = 0.1
    """Floor of the decay, as a share of `learning_rate`."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    """On matrices only; norms have none."""
    max_grad_norm: float = 1.0
    """Global L2 norm to which gradients are clipped; 0 does not clip."""
    schedule: LearningRateSchedule = "cosine"
    warmup_steps: int = 0
    """Steps of linear warm-up; a run shorter than that (a trial) ends on its slope."""
    decay_steps: int | None = None
    """`wsd` only: length of the final linear decay; None takes a tenth of the run."""

    def validate(self) -> list[Problem]:
        problems = []
        if self.learning_rate <= 0:
            problems.append(Problem("optim.learning_rate", f"{self.learning_rate} is not positive"))
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                problems.append(Problem(f"optim.{name}", f"{getattr(self, name)} is not in [0, 1)"))
        if not 0 <= self.min_learning_rate_ratio <= 1:
            problems.append(
                Problem("optim.min_learning_rate_ratio", f"{self.min_learning_rate_ratio} is not in [0, 1]")
            )
        for name in ("weight_decay", "max_grad_norm", "warmup_steps"):
            if getattr(self, name) < 0:
                problems.append(Problem(f"optim.{name}", f"{getattr(self, name)} is negative"))
        if self.eps <= 0:
            problems.append(Problem("optim.eps", f"{self.eps} is not positive"))
        if self.decay_steps is not None and self.schedule != "wsd":
            problems.append(
                Problem(
                    "optim.decay_steps",
                    f"would be ignored by optim.schedule={self.schedule}",
                    "set optim.schedule=wsd, or optim.decay_steps=null",
                )
            )
        return problems


Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Mixed precision: master weights and optimizer states are always float32."""

    name: str
    param_dtype: Dtype = "bfloat16"
    """What forward and backward compute in."""
    reduce_dtype: Dtype = "float32"
    """What gradients are reduced in."""

    def validate(self) -> list[Problem]:
        return []


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When state is saved, where, and how much of it is kept."""

    interval_steps: int
    """Steps between saves; 0 saves only at the end and when asked to stop."""
    keep_last: int = 2
    """Complete checkpoints that survive pruning; at least 2, because the newest may be torn by a failure."""
    storage: Literal["per_host", "shared"] = "per_host"
    """`per_host`: each host has the folder for itself and the platform merges them (SageMaker's /opt/ml/checkpoints);
    `shared`: one folder that every host sees (FSx for Lustre)."""
    path: str = "checkpoints"
    """Folder under the ml root; `{run_id}` is replaced by the run's id."""
    verify_checksums: bool = True
    """Read every byte of a checkpoint before it is trusted; False checks names and sizes only."""
    export_at_end: bool = False
    """Write the finished model to `<ml root>/model` in Hugging Face format."""

    def validate(self) -> list[Problem]:
        problems = []
        if self.interval_steps < 0:
            problems.append(Problem("checkpoint.interval_steps", f"{self.interval_steps} is negative"))
        if self.keep_last < 2:
            problems.append(
                Problem(
                    "checkpoint.keep_last",
                    f"{self.keep_last} leaves nothing to fall back on while the newest is being written",
                    "use 2 or more",
                )
            )
        if not self.path:
            problems.append(Problem("checkpoint.path", "is empty", "checkpoint.path=checkpoints"))
        if self.path.startswith("/") or ".." in self.path.split("/"):
            problems.append(Problem("checkpoint.path", f"{self.path!r} leaves the ml root"))
        return problems


@dataclass(frozen=True, kw_only=True)
class TrainRecipe:
    """Everything `train.py` reads, and nothing else."""

    name: str
    model: ModelConfig
    parallel: ParallelConfig
    train: TrainConfig
    data: DataConfig
    optim: OptimConfig
    precision: PrecisionConfig
    checkpoint: CheckpointConfig

    def validate(self) -> list[Problem]:
        """Every broken rule that needs no world size; see `mesh.layout` and `batch.batch_plan` for those that do."""
        problems: list[Problem] = []
        for section in (
            self.model,
            self.parallel,
            self.train,
            self.data,
            self.optim,
            self.precision,
            self.checkpoint,
        ):
            problems += section.validate()
        if problems:
            return problems
        model, parallel, train, optim = self.model, self.parallel, self.train, self.optim
        if train.sequence_length > model.max_position_embeddings:
            problems.append(
                Problem(
                    "train.sequence_length",
                    f"{train.sequence_length} exceeds model.max_position_embeddings={model.max_position_embeddings}",
                )
            )
        for key, size in (("num_heads", model.num_heads), ("num_kv_heads", model.num_kv_heads)):
            if size % parallel.tensor_parallel:
                problems.append(
                    Problem(
                        "parallel.tensor_parallel",
                        f"{parallel.tensor_parallel} does not divide model.{key}={size}",
                        f"use one of {divisors(size)}",
                    )
                )
                break
        if parallel.pipeline_parallel > model.num_layers:
            problems.append(
                Problem(
                    "parallel.pipeline_parallel",
                    f"{parallel.pipeline_parallel} stages for model.num_layers={model.num_layers}",
                    f"use at most {model.num_layers}",
                )
            )
        elif model.num_layers % parallel.pipeline_parallel:
            problems.append(
                Problem(
                    "parallel.pipeline_parallel",
                    f"{parallel.pipeline_parallel} does not divide model.num_layers={model.num_layers}",
                    f"use one of {divisors(model.num_layers)}",
                )
            )
        if train.sequence_length % (2 * parallel.context_parallel) and parallel.context_parallel > 1:
            problems.append(
                Problem(
                    "parallel.context_parallel",
                    f"2 × {parallel.context_parallel} does not divide train.sequence_length={train.sequence_length}",
                    "head-tail balancing cuts a sequence into twice as many pieces",
                )
            )
        if parallel.expert_parallel > 1 and (model.num_experts == 0 or model.num_experts % parallel.expert_parallel):
            problems.append(
                Problem(
                    "parallel.expert_parallel",
                    f"{parallel.expert_parallel} does not divide model.num_experts={model.num_experts}",
                    f"use one of {divisors(model.num_experts) if model.num_experts else [1]}",
                )
            )
        if model.num_experts and train.compile and self.precision.param_dtype != "bfloat16":
            problems.append(
                Problem(
                    "train.compile",
                    f"torch compiles grouped matrix products of experts in bfloat16 only, and precision.param_dtype is "
                    f"{self.precision.param_dtype}",
                    "set precision=bf16, or train.compile=false",
                )
            )
        if optim.decay_steps is not None and optim.decay_steps + optim.warmup_steps > train.num_steps:
            problems.append(
                Problem(
                    "optim.decay_steps",
                    f"{optim.decay_steps} + optim.warmup_steps={optim.warmup_steps} exceeds "
                    f"train.num_steps={train.num_steps}",
                )
            )
        return problems


def divisors(number: int) -> list[int]:
    """All positive divisors, ascending: the valid values that an error offers."""
    return [d for d in range(1, number + 1) if number % d == 0]


@dataclass(frozen=True, kw_only=True)
class LayoutConfig:
    """The machines that the plan counted on; a worker that finds others stops at once."""

    hosts: int
    workers_per_host: int

    @property
    def world_size(self) -> int:
        return self.hosts * self.workers_per_host


@dataclass(frozen=True, kw_only=True)
class RecipeFile:
    """`recipe.json`, beside `train.py` in the code bundle: the recipe as it was planned."""

    recipe: TrainRecipe
    layout: LayoutConfig
    recipe_hash: str
    """SHA-256 (hex) of the canonical JSON of the whole recipe, the launching side's part included."""
    peak_tflops: float | None = None
    """Dense bf16 peak of one accelerator, from the catalogue, for MFU; None prints MFU as unknown."""
    schema_version: int = field(default=SCHEMA_VERSION)
