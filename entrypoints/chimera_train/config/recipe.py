"""What the trainer reads: one frozen dataclass a section, in the standard library alone.

The launching side (`chimera_sm.recipe.schema`) extends these classes with what only it knows; the container reads the
same classes back from `recipe.json`. A field's docstring stands under it and says unit, interaction and rule.
Rules over one section are in its `validate`, rules over several in `TrainRecipe.validate`; both return a list of
`Problem`, so that a user sees every error of a recipe at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .checkpoint import CheckpointConfig
from .context import context_problems
from .data import DataConfig
from .decode import ConfigError
from .evaluation import EvaluationConfig
from .hf_architectures import architecture_of
from .model import ModelConfig
from .optim import QUANTISATION_BLOCK, OptimConfig
from .parallel import ParallelConfig
from .pipeline_rules import pipeline_problems
from .precision import FLOAT8_MULTIPLE, PrecisionConfig, gather_problems
from .problem import Problem, divisors
from .profiling import ProfilingConfig
from .sizes import oversized
from .tensor import tensor_problems
from .train import TrainConfig

SCHEMA_VERSION = 1


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
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)

    def validate(self) -> list[Problem]:
        """Every broken rule that needs no world size; see `mesh.layout` and `batch.batch_plan` for those that do."""
        problems = oversized(self)
        if problems:
            return problems
        for section in (
            self.model,
            self.parallel,
            self.train,
            self.data,
            self.optim,
            self.precision,
            self.checkpoint,
            self.evaluation,
            self.profiling,
        ):
            problems += section.validate()
        if problems:
            return problems
        problems += [
            Problem(
                f"evaluation.sources.{name}",
                f"{path!r} is data.path, the training data",
                "give a folder of documents that the training does not see",
            )
            for name, path in self.evaluation.sources.items()
            if path.strip("/") == self.data.path.strip("/")
        ]
        start_step = self.profiling.start_step
        if start_step is not None and start_step > self.train.num_steps:
            message = f"{start_step} never comes: train.num_steps={self.train.num_steps}"
            problems.append(Problem("profiling.start_step", message, "null plans none", no_effect=True))
        model, parallel, train, optim = self.model, self.parallel, self.train, self.optim
        if train.sequence_length > model.max_position_embeddings:
            problems.append(
                Problem(
                    "train.sequence_length",
                    f"{train.sequence_length} exceeds model.max_position_embeddings={model.max_position_embeddings}",
                )
            )
        problems += tensor_problems(model, parallel, train)
        problems += pipeline_problems(model, parallel, train)
        problems += context_problems(model, parallel, train, self.data)
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
        problems += self._eight_bit_blocks() + self._float8_tokens()
        if parallel.fully_sharded is not None:  # else it is known with the machines
            problems += gather_problems(self.precision, parallel.fully_sharded * parallel.context_parallel)
        if self.checkpoint.export_at_end:
            try:
                architecture_of(model)
            except ConfigError as error:
                why = error.problems[0].message
                problems.append(Problem("checkpoint.export_at_end", why, "set checkpoint.export_at_end=false"))
        if optim.decay_steps is not None and optim.decay_steps + optim.warmup_steps > train.num_steps:
            problems.append(
                Problem(
                    "optim.decay_steps",
                    f"{optim.decay_steps} + optim.warmup_steps={optim.warmup_steps} exceeds "
                    f"train.num_steps={train.num_steps}",
                )
            )
        return problems

    def _float8_tokens(self) -> list[Problem]:
        """The gradient of a weight is a product over tokens, whose count must be a multiple too."""
        float8, train, context = self.precision.float8, self.train, self.parallel.context_parallel
        tokens = train.micro_batch_size * train.sequence_length // context
        if float8 == "none" or tokens % FLOAT8_MULTIPLE[float8] == 0:
            return []
        message = (
            f"{float8} multiplies over the tokens of a micro-batch on a rank, and train.micro_batch_size × "
            f"train.sequence_length / parallel.context_parallel = {tokens} is no multiple of {FLOAT8_MULTIPLE[float8]}"
        )
        return [Problem("precision.float8", message, "choose such a train.sequence_length, or precision.float8=none")]

    def _eight_bit_blocks(self) -> list[Problem]:
        """Tensor parallel cuts rows of two projections; a block of 8-bit states may not lie across a cut."""
        model, tensor = self.model, self.parallel.tensor_parallel
        if self.optim.state_dtype != "int8" or tensor == 1:
            return []
        widths = {
            "the width of attention (model.num_heads × head dimension)": model.num_heads * model.value_dim,
            "model.intermediate_size": model.intermediate_size,
        }
        return [
            Problem(
                "optim.state_dtype",
                f"int8 has a scale for every {QUANTISATION_BLOCK} elements of a row, and {QUANTISATION_BLOCK} × "
                f"parallel.tensor_parallel={tensor} does not divide {key}={width}",
                "set optim.state_dtype=bfloat16, or another parallel.tensor_parallel",
            )
            for key, width in widths.items()
            if width % (QUANTISATION_BLOCK * tensor)
        ]


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
