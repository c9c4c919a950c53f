"""torchtitan 0.3.0's own trainer on the workload; on a machine without a GPU, made to run there.

It has no CPU mode. What is replaced there: the choice of the device, the CUDA calls of its memory monitor, barriers
that name a device, sharded sums (gloo has no premultiplied sum), and attention, because its flex and varlen kernels
have no backward pass on a CPU and its SDPA module has one. On a GPU nothing is replaced, and its own defaults stand.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from workload import Recorder, read_workload, windows

ON_GPU = torch.cuda.is_available()


def run_on_cpu() -> None:
    """Before torchtitan is imported, because it asks for the device then."""
    torch._utils._get_available_device_type = lambda: "cpu"
    module = torch.cpu
    module.get_device_name = lambda device=None: "CPU"
    module.get_device_properties = lambda device=None: types.SimpleNamespace(total_memory=2**34)
    module.memory_stats = lambda device=None: {}
    module.reset_peak_memory_stats = module.empty_cache = lambda: None

    barrier = dist.barrier
    dist.barrier = lambda *arguments, device_ids=None, **options: barrier(*arguments, **options)

    from torch.distributed.fsdp import FSDPModule

    set_factor = FSDPModule.set_gradient_divide_factor

    def set_factor_and_sum(self: FSDPModule, factor: float) -> None:
        set_factor(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = set_factor_and_sum


if not ON_GPU:
    run_on_cpu()
HAS_ITS_TORCH = hasattr(dist, "set_timeout")  # it is written for torch 2.14
if not HAS_ITS_TORCH:
    dist.set_timeout = torch.distributed.distributed_c10d._set_pg_timeout

from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.config.configs import CommConfig  # noqa: E402
from torchtitan.distributed.activation_checkpoint import SelectiveAC  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.tools import utils  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

WORKLOAD = read_workload()
FLAVORS = {"debug": "debugmodel", "llama3_1b": "1B", "llama3_8b": "8B"}


class TokenLoader(BaseDataLoader):
    """Ready tokens in place of text, so that no tokenizer is part of the measured time."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, **options: Any):
        pass

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for window in windows(WORKLOAD):
            tokens = torch.from_numpy(window)
            inputs = {"input": tokens[:, :-1].contiguous()}
            if ON_GPU:  # its masked attention kernels want them
                inputs["positions"] = torch.arange(tokens.shape[1] - 1).expand(len(tokens), -1).contiguous()
            yield inputs, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **options: Any):
        pass

    def encode(self, *arguments: Any, **options: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *arguments: Any, **options: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return WORKLOAD.model.vocab_size


def trainer_config() -> Trainer.Config:
    spec = model_registry(FLAVORS[WORKLOAD.model.name])
    if not ON_GPU:
        for layer in spec.model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    loss = CrossEntropyLoss.Config(global_vocab_size=WORKLOAD.model.vocab_size)
    return Trainer.Config(
        model_spec=spec,
        loss=ChunkedLossWrapper.Config(loss_fn=loss) if WORKLOAD.save_memory else loss,
        tokenizer=NoTokenizer.Config(),
        dataloader=TokenLoader.Config(),
        optimizer=default_adamw(lr=WORKLOAD.learning_rate),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=WORKLOAD.micro_batch_size,
            seq_len=WORKLOAD.sequence_length,
            steps=WORKLOAD.num_steps,
            max_norm=WORKLOAD.max_grad_norm,
            mixed_precision_param=WORKLOAD.param_dtype,
            disable_cuda_graphs=True,
        ),
        # Its default, spmd_types, passes plain tensors to fully_shard, which torch before 2.14 refuses.
        parallelism=ParallelismConfig() if HAS_ITS_TORCH else ParallelismConfig(spmd_backend="partial_dtensor"),
        metrics=MetricsProcessor.Config(log_freq=WORKLOAD.log_interval),
        checkpoint=CheckpointManager.Config(enable=False),
        activation_checkpoint=SelectiveAC.Config() if WORKLOAD.save_memory else None,
        compile=CompileConfig(enable=WORKLOAD.compile),
        comm=CommConfig(trace_buf_size=0),
    )


def main() -> None:
    init_logger()
    if not ON_GPU:
        utils.get_local_device = lambda: torch.device("cpu")
        import torchtitan.distributed.utils

        torchtitan.distributed.utils.get_local_device = utils.get_local_device
    trainer = trainer_config().build()
    recorder = Recorder(sum(parameter.numel() for part in trainer.model_parts for parameter in part.parameters()))
    train_step, log = trainer.train_step, trainer.metrics_processor.log

    def recorded_step(data: Any) -> None:
        train_step(data)
        recorder.step_done()

    def recorded_log(step: int, loss: float, *arguments: Any, **options: Any) -> None:
        recorder.losses.append(loss)
        log(step, loss, *arguments, **options)

    trainer.train_step, trainer.metrics_processor.log = recorded_step, recorded_log
    trainer.train()
    recorder.write()
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
