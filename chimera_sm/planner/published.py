"""From a line of a table of published runs to a case.

The table's columns are those of `benchmarks/planner_accuracy.py`. Cells are text; an unknown one is empty. Measured
cells (time, tokens/s, FLOP/s, MFU, memory, status) are never read here.

Where a row leaves something out that a framework would not, what is usual is taken, and each such rule is one for all
rows: none names a source.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from .case import Case
from .tables import rows

USUAL_VOCABULARY = 51_200.0
"""GPT-2's, padded; of rows that name none."""
ADAPTERS = ("lora", "qlora", "adapter")


class Unusable(ValueError):
    """The row cannot be predicted; the message says why."""


def number(row: Mapping[str, str], column: str) -> float | None:
    """None for an empty cell. Raises Unusable for one that is no positive number."""
    text = (row.get(column) or "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise Unusable(f"{column} is no number: {text!r}") from None
    if not (math.isfinite(value) and value >= 0):
        raise Unusable(f"{column} is out of range: {text}")
    return value


def needed(row: Mapping[str, str], column: str) -> float:
    value = number(row, column)
    if not value:
        raise Unusable(f"{column} is not given")
    return value


def degree(row: Mapping[str, str], column: str) -> float:
    return number(row, column) or 1.0


@functools.cache
def _table(name: str, key: str) -> dict[str, dict[str, str]]:
    return {row[key]: row for row in rows(name)}


def gpu_of(row: Mapping[str, str]) -> Mapping[str, str]:
    name = (row.get("gpu") or "").strip()
    if not name:
        raise Unusable("gpu is not given")
    try:
        return _table("gpus", "gpu")[name]
    except KeyError:
        raise Unusable(f"gpu is not known: {name}") from None


def stack_of(row: Mapping[str, str]) -> str:
    """The family of the framework. Megatron-LM with flash attention is Megatron-Core by another name: it is told by
    its hardware, because the old one was never run on what came after the A100."""
    framework = (row.get("framework") or "").lower()
    for stack, known in _table("stacks", "stack").items():
        if known["frameworks"] and any(word in framework for word in known["frameworks"].split("|")):
            if stack == "megatron_2021" and gpu_of(row)["family"] != "a100":
                continue
            return stack
    return "megatron_core"


@dataclass(frozen=True)
class Shape:
    """Of the model, as a row and the table of architectures give it."""

    layers: float
    hidden: float
    heads: float
    kv_heads: float
    head_width: float
    value_head_width: float
    attention_parameters: float
    mlp_width: float
    mlp_parameters: float
    num_experts: float
    experts_per_token: float
    expert_width: float
    expert_parameters: float
    shared_experts: float
    expert_layers: float
    vocabulary: float

    @property
    def num_parameters(self) -> float:
        dense = (self.layers - self.expert_layers) * self.mlp_parameters
        experts = self.expert_layers * (self.num_experts + self.shared_experts) * self.expert_parameters
        return self.layers * self.attention_parameters + dense + experts + 2 * self.vocabulary * self.hidden


def shape_of(row: Mapping[str, str]) -> Shape:
    """Raises Unusable where the row does not give the shape of the model, nor enough to work it out."""
    hidden = number(row, "hidden")
    if not hidden:
        raise Unusable("the shape of the model is not given")
    known = _architecture(row.get("model") or "")
    vocabulary = number(row, "vocab") or USUAL_VOCABULARY
    gated = (row.get("gated_mlp") or "").strip() == "1"
    width = number(row, "ffn_hidden")
    experts = number(row, "num_experts") or 0.0
    if experts <= 1:
        experts = 0.0
    if width is None:
        width = float(math.ceil(8 * hidden / 3 / 256) * 256) if gated else 4 * hidden
    if known.get("dense_width"):
        width = float(known["dense_width"])
    expert_width = number(row, "moe_ffn_hidden") or width
    matrices = 3 if gated else 2
    heads = float(known["heads"]) if known.get("heads") else number(row, "heads") or max(1.0, hidden // 128)
    kv_heads = number(row, "kv_heads") or heads
    head_width = float(known["head_width"]) if known.get("head_width") else hidden / heads
    value_width = float(known["value_width"]) if known.get("value_width") else head_width
    attention = hidden * head_width * (heads + kv_heads) + hidden * value_width * (kv_heads + heads)
    if known.get("attention_parameters"):
        attention = float(known["attention_parameters"])
    layers = number(row, "layers")
    if not layers:
        parameters = number(row, "params_b")
        if not parameters or experts:
            raise Unusable("the shape of the model is not given")
        layers = float(round((parameters * 1e9 - vocabulary * hidden) / (attention + matrices * hidden * width)))
    expert_layers = 0.0
    if experts:
        expert_layers = (layers - float(known.get("dense_layers") or 0)) / float(known.get("expert_every") or 1)
    return Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        value_head_width=value_width,
        attention_parameters=attention,
        mlp_width=width,
        mlp_parameters=matrices * hidden * width,
        num_experts=experts,
        experts_per_token=(number(row, "top_k") or 2.0) if experts else 0.0,
        expert_width=expert_width if experts else 0.0,
        expert_parameters=matrices * hidden * expert_width if experts else 0.0,
        shared_experts=float(known.get("shared_experts") or 0) if experts else 0.0,
        expert_layers=expert_layers,
        vocabulary=vocabulary,
    )


def _architecture(model: str) -> Mapping[str, str]:
    for name, known in _table("architectures", "model").items():
        if model.startswith(name):
            return known
    return {}


@dataclass(frozen=True)
class Layout:
    """How a row's ranks and sequences are divided."""

    world: float
    per_host: float
    tensor: float
    pipeline: float
    virtual: float
    context: float
    expert: float
    data: float
    """Ranks that see different sequences."""
    shard: float
    """Ranks that parameters are sharded over; 1: none."""
    zero_stage: float
    micro_batch: float
    micro_batches: float

    @property
    def global_batch(self) -> float:
        return self.micro_batch * self.micro_batches * self.data


def layout_of(row: Mapping[str, str]) -> Layout:
    """Raises Unusable where the row does not say how the model is divided, or contradicts itself."""
    gpu = gpu_of(row)
    ranks = float(gpu["ranks"])
    world = needed(row, "num_gpus") * ranks
    per_host = (number(row, "gpus_per_node") or min(8.0, world)) * ranks
    tensor, pipeline = number(row, "tp"), number(row, "pp")
    if tensor is None or pipeline is None:
        raise Unusable("the layout is not given")
    tensor, pipeline, context = max(1.0, tensor), max(1.0, pipeline), degree(row, "cp")
    data = world / (tensor * pipeline * context)
    if data < 1:
        raise Unusable(f"tp × pp × cp exceeds {world:g} ranks")
    stage = number(row, "zero_stage")
    shard = degree(row, "fsdp")
    if shard == 1 and stage == 3:
        shard = data
    if stage is None:
        stage = 3.0 if shard > 1 else 1.0
    micro_batch, global_batch = number(row, "micro_batch"), number(row, "global_batch_seqs")
    accumulated = number(row, "grad_accum")
    if micro_batch is None:
        if global_batch and accumulated:
            micro_batch = max(1.0, global_batch / data / accumulated)
        elif global_batch or accumulated:
            micro_batch = 1.0
        else:
            raise Unusable("no batch size is given")
    if global_batch:
        accumulated = global_batch / data / micro_batch
        if accumulated < 0.49:
            raise Unusable(f"a global batch of {global_batch:g} is less than one micro-batch a replica")
    return Layout(
        world=world,
        per_host=per_host,
        tensor=tensor,
        pipeline=pipeline,
        virtual=degree(row, "vp"),
        context=context,
        expert=degree(row, "ep"),
        data=data,
        shard=min(shard, data) * (context if shard > 1 else 1.0),
        zero_stage=stage,
        micro_batch=micro_batch,
        micro_batches=max(1.0, accumulated or 1.0),
    )


def case_of(row: Mapping[str, str]) -> Case:
    """Raises Unusable, which says what the row lacks."""
    if "CHECK" in (row.get("notes") or ""):
        raise Unusable("the row contradicts itself (marked CHECK)")
    gpu, shape, layout, stack = gpu_of(row), shape_of(row), layout_of(row), stack_of(row)
    sequence = needed(row, "seq_len")
    family = gpu["family"]
    precision = (row.get("precision") or "").strip()
    if not precision:  # Transformer Engine's stacks name a precision where it is not their usual one
        precision = "fp8" if stack == "megatron_core" and family in ("h100", "blackwell") else "bf16"
    if precision in ("fp16", "fp32"):
        precision = "bf16"
    recompute = (row.get("activation_ckpt") or "").strip()
    words = f"{row.get('framework') or ''} {row.get('notes') or ''}".lower()
    return Case(
        family=family,
        peak_tflops=float(gpu["peak_tflops"]),
        memory_gb_s=float(gpu["memory_gb_s"]),
        link_gb_s=float(gpu["link_gb_s"]),
        switched_link=float(gpu["link_gb_s"]) > 64,
        network_gb_s=network_of(row, layout.per_host) or float(gpu["network_gb_s"]),
        per_host=layout.per_host,
        link_domain=max(float(gpu["link_domain"]), layout.per_host),
        stack=stack,
        precision=precision,
        compiled="compile" in words and "eager" not in words,
        flash=stack != "megatron_2021",
        released=released(words),
        layers=shape.layers,
        expert_layers=shape.expert_layers,
        hidden=shape.hidden,
        query_width=shape.heads * shape.head_width,
        value_width=shape.heads * shape.value_head_width,
        key_value_width=shape.kv_heads * (shape.head_width + shape.value_head_width),
        head_width=shape.head_width,
        heads=shape.heads,
        mlp_width=shape.mlp_width,
        attention_parameters=shape.attention_parameters,
        mlp_parameters=shape.mlp_parameters,
        num_experts=shape.num_experts,
        experts_per_token=shape.experts_per_token,
        expert_width=shape.expert_width,
        expert_parameters=shape.expert_parameters,
        shared_experts=shape.shared_experts,
        vocabulary=shape.vocabulary,
        attended=sequence,
        sequence=sequence,
        micro_batch=layout.micro_batch,
        micro_batches=layout.micro_batches,
        world=layout.world,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        stages_per_rank=layout.virtual,
        context=layout.context,
        expert=layout.expert,
        shard=layout.shard,
        replicas=max(1.0, layout.data * layout.context / layout.shard),
        idle_micro_batches=(layout.pipeline - 1) / layout.virtual,
        shards_optimizer=layout.zero_stage >= 1,
        gathers=layout.micro_batches,
        gathers_again=layout.zero_stage == 3,
        reductions=layout.micro_batches,
        recomputed=float(recompute == "full"),
        selective=float(recompute == "selective"),
        adapter=(row.get("workload") or "").strip() in ADAPTERS,
    )


def network_of(row: Mapping[str, str], per_host: float) -> float | None:
    """GB/s of one rank, out of the words of `interconnect`; None where they give no figure."""
    words = row.get("interconnect") or ""
    if match := re.search(r"(\d+)\s*Gb(?:ps|/s)[^;]*?per GPU", words):
        return float(match[1]) / 8
    per_node = None
    if match := re.search(r"(\d+)\s*x\s*(?:HDR\s*)?(\d+)\s*Gb", words):
        per_node = float(match[1]) * float(match[2])
    elif match := re.search(r"(\d+)\s*Gb(?:ps|/s)[^;]*?(?:per |/)node", words):
        per_node = float(match[1])
    elif match := re.search(r"(\d+)\s*x\s*ConnectX-([678])", words):
        per_node = float(match[1]) * {"6": 200, "7": 400, "8": 800}[match[2]]
    elif match := re.search(r"EFA (\d+)", words):
        per_node = float(match[1])
    return None if per_node is None else per_node / 8 / per_host


def released(words: str) -> float:
    """Months from January 2022 to a release that is named by year and month (25.04, v24.11.1); NaN without one."""
    match = re.search(r"\b(?:v|r)?(2[2-9])\.(0[1-9]|1[0-2])(?!\d)", words)
    return math.nan if match is None else (int(match[1]) - 22) * 12 + int(match[2]) - 1.0
