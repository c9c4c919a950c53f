"""What a pipeline's stage holds of what it received."""

from __future__ import annotations

import pytest
import torch
from spawn import run_distributed
from test_parity_layouts import GLOBAL_BATCH, Row, recipe_of, run_row

from chimera_train.parallel.pipeline_stage import OnDemandStage


def buffers_with_memory(row: Row) -> list[tuple[int, int]]:
    """Of this rank's stages, for hidden states and for gradients: after every forward and backward of a micro-batch,
    and last of all after the step."""
    counts, stages = [], set()

    def count() -> tuple[int, int]:
        held = [
            sum(
                getattr(info, "buffer", None) is not None and info.buffer.device.type != "meta"
                for stage in stages
                for infos in getattr(stage, name).values()
                for info in infos
            )
            for name in ("args_recv_info", "grad_recv_info")
        ]
        return held[0], held[1]

    def counted(method):
        def call(stage, *args, **kwargs):
            stages.add(stage)
            result = method(stage, *args, **kwargs)
            counts.append(count())
            return result

        return call

    for name in ("forward_one_chunk", "backward_one_chunk"):
        setattr(OnDemandStage, name, counted(getattr(OnDemandStage, name)))
    run_row(row)
    return [*counts, count()]


@pytest.mark.train
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv"])
def test_a_stage_holds_only_what_the_next_micro_batches_need(schedule: str):
    row = Row("memory", 2, model="deep", steps=2, micro_batch_size=1,
              parallel={"pipeline_parallel": 2, "pipeline_schedule": schedule})  # fmt: skip
    assert recipe_of(row).train.micro_batch_size < GLOBAL_BATCH // 4
    for counts in run_distributed(buffers_with_memory, 2, row):
        assert len(counts) >= 2 * 2 * GLOBAL_BATCH
        most = [max(column) for column in zip(*counts, strict=True)]
        assert max(most) <= 3, "received ahead of their turn, not all micro-batches at once"
        assert counts[-1] == (0, 0)


def test_a_buffer_that_waits_has_a_shape_and_no_memory():
    from chimera_train.parallel.pipeline_stage import _move

    class Info:
        buffer = torch.zeros(2, 3, dtype=torch.bfloat16, requires_grad=True)

    class Root: ...

    info = Info()
    _move((info, Root()), "meta")
    assert (info.buffer.device.type, info.buffer.shape, info.buffer.requires_grad) == ("meta", (2, 3), True)
    _move((info,), "cpu")
    assert (info.buffer.device.type, info.buffer.dtype) == ("cpu", torch.bfloat16)
