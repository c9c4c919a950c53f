"""Pipeline parallel: a rank holds some stages of the model, and micro-batches travel through them.

The order of work is torch's (torch.distributed.pipelining); shapes are known beforehand, so that ranks exchange
nothing but hidden states and their gradients. Every rank of a pipeline is given the same tokens and labels: the first
stage reads the tokens, the last makes the loss from the labels, and all count them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as torch_schedules

from ..config import TrainRecipe
from ..config.schedules import PipelineSchedule
from ..loss import LossSum
from ..model import Decoder
from ..model.parts import ModelParts
from .fsdp import free_gathered
from .meshes import Meshes
from .pipeline_stage import OnDemandStage
from .tied import TiedEmbedding

_TORCH_SCHEDULES: dict[PipelineSchedule, Callable[..., Any]] = {
    "gpipe": torch_schedules.ScheduleGPipe,
    "1f1b": torch_schedules.Schedule1F1B,
    "interleaved_1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
    "dualpipev": torch_schedules.ScheduleDualPipeV,
}


class Pipeline(ModelParts):
    """This rank's stages, parallelized already, and the order in which they work. Collective over the pipeline axis."""

    def __init__(self, parts: list[Decoder], recipe: TrainRecipe, meshes: Meshes):
        super().__init__(parts)
        self._recipe = recipe
        self._layout = meshes.layout
        self._group = meshes.group("pipeline")
        self._rank = meshes.at["pipeline"]
        self._dtype = getattr(torch, recipe.precision.param_dtype)
        self._tied = TiedEmbedding(self, self._layout, self._group)
        self._rows: list[Tensor] = []
        """Of every micro-batch so far: the cross-entropy of each sequence."""
        if parts[-1].stage.last:
            parts[-1].register_forward_hook(self._take_loss)

    def forward_backward(self, tokens: Tensor, labels: Tensor, num_micro_batches: int) -> Tensor:
        """Accumulate gradients of the loss summed over tokens, and reduce them over data-parallel ranks.

        tokens, labels: int64 [sequences, S], the micro-batches one after the other. Returns the cross-entropy of each
        sequence, float32 [sequences], on the rank with the last stage; zeros elsewhere.
        """
        self._tied.refresh()
        micro_batch = (len(tokens) // num_micro_batches, tokens.shape[1])
        schedule = self._schedule(num_micro_batches, *micro_batch, tokens.device)
        first = self._rank == self._layout.rank_of_stage(0)
        last = self._rank == self._layout.rank_of_stage(self._layout.num_stages - 1)
        schedule.step(
            *([tokens] if first else []),
            target=labels if last else None,
            return_outputs=False,
            labels_BS=labels,
        )
        self._tied.wait()
        self._tied.add_gradient()
        return self._rows_of(tokens)

    @torch.no_grad()
    def forward_only(self, tokens: Tensor, labels: Tensor, num_micro_batches: int) -> Tensor:
        """As `forward_backward`, without gradients. All micro-batches go through a rank's first stage, then through its
        next one."""
        self._tied.refresh()
        sent: list[dist.Work | None] = []
        token_pieces, label_pieces = tokens.chunk(num_micro_batches), labels.chunk(num_micro_batches)
        shape = self._hidden_shape(*token_pieces[0].shape)
        handed_on: list[Tensor] = []
        for part in self.parts:
            number = part.stage.number
            source = None if part.stage.first else self._layout.rank_of_stage(number - 1)
            target = None if part.stage.last else self._layout.rank_of_stage(number + 1)
            given, handed_on = handed_on, []
            for index, labels_BS in enumerate(label_pieces):
                if source is None:
                    x = token_pieces[index]
                elif source == self._rank:
                    x = given[index]
                else:
                    x = torch.empty(shape, dtype=self._dtype, device=tokens.device)
                    dist.recv(x, group=self._group, group_src=source)
                out = part(x, labels_BS)
                if target is not None:
                    handed_on.append(out)
                    # NCCL works off what goes between two ranks in one order: where the sender is the receiver too, it
                    # sends all before it receives, and so must we receive all first.
                    if target not in (self._rank, source):
                        sent.append(self._send(out, target))
            if target is not None and target == source and target != self._rank:
                sent += [self._send(out, target) for out in handed_on]
        self._tied.wait()
        for work in sent:
            if work is not None:
                work.wait()
        for part in self.parts:  # they are FSDP's roots; `self.modules()` has only what is inside of them
            free_gathered(part)
        return self._rows_of(tokens)

    def _send(self, x: Tensor, target: int) -> dist.Work | None:
        return dist.isend(x.contiguous(), group=self._group, group_dst=target)

    def _hidden_shape(self, sequences: int, length: int) -> tuple[int, int, int]:
        return sequences, length // self.parts[0].sequence_split, self.config.hidden_size

    @functools.cache  # noqa: B019 one pipeline a process, which lives as long as it
    def _schedule(self, num_micro_batches: int, sequences: int, length: int, device: torch.device) -> Any:
        hidden = torch.empty(
            self._hidden_shape(sequences, length), dtype=self._dtype, device="meta", requires_grad=True
        )
        tokens = torch.empty(sequences, length, dtype=torch.int64, device="meta")
        loss = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
        stages = [
            OnDemandStage(
                part,
                part.stage.number,
                self._layout.num_stages,
                device,
                input_args=(tokens if part.stage.first else hidden,),
                output_args=(loss if part.stage.last else hidden,),
                group=self._group,
            )
            for part in self.parts
        ]
        make = _TORCH_SCHEDULES[self._layout.schedule]
        single = self._layout.schedule in ("gpipe", "1f1b")
        return make(stages[0] if single else stages, num_micro_batches, loss_fn=_passed_through, scale_grads=False)

    def _take_loss(self, module: nn.Module, arguments: Any, output: LossSum) -> Tensor:
        self._rows.append(output.rows_B)
        return output.total

    def _rows_of(self, tokens: Tensor) -> Tensor:
        rows = torch.cat(self._rows) if self._rows else torch.zeros(len(tokens), device=tokens.device)
        self._rows.clear()
        return rows


def _passed_through(loss: Tensor, labels: Tensor) -> Tensor:
    return loss
