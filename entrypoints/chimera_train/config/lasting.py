"""What of the trainer's recipe lasts as long as its run, and what may change when the run goes on from a checkpoint.

A checkpoint is parameters, the states of an optimizer and a place in the data; what says how to read them cannot change
under it. Every key is in one of the two collections, so that whoever adds a key decides. The launching side adds its
own keys (`chimera_sm.recipe.lasting`) and refuses a change before a machine is started.
"""

from __future__ import annotations

DATA_PLACE = {"seed": "train.seed", "sequence_length": "train.sequence_length", "shuffle": "data.shuffle"}
"""The place in the data is a count of samples, and these keys say which samples are counted; by the name that the
loader saves the value under."""

_DATA = "the data are those of the launch: the run has a place in them"

LASTING = {
    "name": "the run is recorded under it",
    "model": "the checkpoint holds the parameters of that model",
    **dict.fromkeys(DATA_PLACE.values(), "the place in the data would be lost"),
    "train.initial_weights": "the run goes on from its checkpoint, and would not read them",
    "data.name": _DATA,
    "data.channel": _DATA,
    "data.path": _DATA,
    "data.separate_documents": "the model would see other text for the same tokens from here on",
    "optim.name": "the checkpoint holds the states of that optimizer",
    "optim.state_dtype": "the checkpoint holds the optimizer's states in that format",
    "precision.master_weights": "the checkpoint holds the parameters in the format that it asks for",
    "checkpoint.path": "the checkpoints of the run are there",
    "checkpoint.storage": "the checkpoints of the run are there",
}
"""Key, or section of which no key may change → why."""

CHANGEABLE = frozenset(
    {
        *(
            f"parallel.{name}"
            for name in (
                "data_parallel",
                "fully_sharded",
                "tensor_parallel",
                "async_tensor_parallel",
                "pipeline_parallel",
                "context_parallel",
                "context_backend",
                "expert_parallel",
                "pipeline_schedule",
                "stages_per_rank",
                "reshard_after_forward",
                "defer_gradient_sync",
            )
        ),
        *(
            f"train.{name}"
            for name in (
                "num_steps",  # to more than the run has done
                "global_batch_size",
                "micro_batch_size",
                "activation_checkpointing",
                "activation_checkpointing_every",
                "activation_memory_budget",
                "activation_offload",
                "compile",
                "loss_chunk_tokens",
                "z_loss",
                "deterministic",
                "log_interval",
                "collective_timeout_s",
            )
        ),
        "data.prefetch_batches",
        *(
            f"optim.{name}"
            for name in (
                "learning_rate",
                "min_learning_rate_ratio",
                "beta1",
                "beta2",
                "eps",
                "momentum",
                "weight_decay",
                "offload",
                "max_grad_norm",
                "schedule",
                "warmup_steps",
                "decay_steps",
            )
        ),
        *(
            f"precision.{name}"
            for name in ("name", "param_dtype", "reduce_dtype", "float8", "float8_filter", "float8_all_gather")
        ),
        *(f"checkpoint.{name}" for name in ("interval_steps", "keep_last", "verify_checksums", "export_at_end")),
        *(f"evaluation.{name}" for name in ("sources", "interval_steps", "max_samples")),
        *(f"profiling.{name}" for name in ("start_step", "num_steps", "ranks", "memory_snapshot")),
    }
)
