"""The step-time model over published rows: rows become cases, and one case is predicted as it is among many."""

from __future__ import annotations

import math

import pytest

from chimera_sm.planner.case import batch
from chimera_sm.planner.effective import fitted
from chimera_sm.planner.published import Unusable, case_of, network_of, released
from chimera_sm.planner.step_model import step_time

LLAMA = {
    "model": "llama3-8b", "layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "8", "ffn_hidden": "14336",
    "vocab": "128256", "gated_mlp": "1", "seq_len": "8192", "gpu": "h100-sxm", "num_gpus": "64", "gpus_per_node": "8",
    "framework": "torchtitan FSDP2 + compile", "precision": "bf16", "fsdp": "64", "tp": "1", "pp": "1",
    "micro_batch": "2", "global_batch_seqs": "128", "activation_ckpt": "selective", "workload": "pretrain",
}  # fmt: skip
QWEN = {
    "model": "qwen3-30b-a3b", "layers": "48", "hidden": "2048", "heads": "32", "kv_heads": "4", "num_experts": "128",
    "top_k": "8", "moe_ffn_hidden": "768", "vocab": "151936", "gated_mlp": "1", "seq_len": "4096", "gpu": "h100-sxm",
    "num_gpus": "16", "gpus_per_node": "8", "framework": "Megatron-Bridge", "precision": "bf16", "tp": "1", "pp": "2",
    "vp": "4", "ep": "8", "micro_batch": "1", "global_batch_seqs": "512", "workload": "pretrain",
}  # fmt: skip
GPT = {
    "model": "gpt", "layers": "40", "hidden": "6144", "heads": "48", "gpu": "a100-80", "seq_len": "2048",
    "num_gpus": "256", "gpus_per_node": "8", "framework": "Megatron-DeepSpeed", "tp": "8", "pp": "4",
    "micro_batch": "4", "global_batch_seqs": "1024", "activation_ckpt": "full", "gated_mlp": "0",
    "interconnect": "NVLink; 800 Gbps per node",
}  # fmt: skip


def total(row: dict[str, str], **changes: str) -> float:
    return float(step_time(case_of({**row, **changes}), fitted()).total)


def test_one_case_is_predicted_as_it_is_among_many() -> None:
    many = step_time(batch([case_of(row) for row in (LLAMA, QWEN, GPT)]), fitted()).total
    assert many == pytest.approx([total(LLAMA), total(QWEN), total(GPT)], rel=1e-12)


def test_components_are_not_negative_and_make_the_step() -> None:
    for row in (LLAMA, QWEN, GPT):
        found = step_time(case_of(row), fitted())
        assert min(found.components.values()) >= 0
        assert found.total == pytest.approx(sum(found.components.values()))


def test_speed_of_llama_on_h100_is_near_what_was_published() -> None:
    """torchtitan on 128 H100: 5,605 tokens/s each uncompiled, 6,514 compiled (its benchmarks of 2024-12)."""
    rate = 2 * 8192 / total(LLAMA)
    assert 5000 < rate < 8500


@pytest.mark.parametrize(
    ("changes", "slower"),
    [
        ({"activation_ckpt": "full"}, True),
        ({"seq_len": "16384"}, True),
        ({"gpu": "a100-80"}, True),
        ({"precision": "fp8"}, False),
        ({"workload": "lora"}, False),
    ],
)
def test_a_change_moves_the_step_the_right_way(changes: dict[str, str], slower: bool) -> None:
    assert (total(LLAMA, **changes) > total(LLAMA)) is slower


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"hidden": ""}, "the shape of the model is not given"),
        ({"tp": ""}, "the layout is not given"),
        ({"gpu": "h101"}, "gpu is not known: h101"),
        ({"seq_len": ""}, "seq_len is not given"),
        ({"seq_len": "nan"}, "seq_len is out of range"),
        ({"layers": "many"}, "layers is no number"),
        ({"tp": "128"}, "exceeds 64 ranks"),
        ({"notes": "CHECK: step and tokens/s differ"}, "contradicts itself"),
    ],
)
def test_a_row_that_lacks_something_says_what(changes: dict[str, str], why: str) -> None:
    with pytest.raises(Unusable, match=why):
        case_of({**LLAMA, **changes})


def test_measured_cells_are_not_read() -> None:
    measured = {"step_time_s": "1", "tokens_per_s_per_gpu": "1", "peak_mem_gib": "1", "status": "oom", "mfu_pct": "1"}
    assert total(LLAMA, **measured) == total(LLAMA)


@pytest.mark.parametrize(
    ("words", "gb_s"),
    [
        ("NVLink; 4x100Gb/s Omni-Path per node", 6.25),
        ("1600 Gbps/node RoCE", 25.0),
        ("NVLink intra; 400 Gb/s RDMA per GPU", 50.0),
        ("4x ConnectX-7 IB NDR 400Gb/s", 25.0),
        ("EFA 3200 Gbps (p5.48xlarge)", 50.0),
        ("Ethernet", None),
    ],
)
def test_words_about_the_network_give_its_bandwidth(words: str, gb_s: float | None) -> None:
    assert network_of({"interconnect": words}, per_host=8) == gb_s


def test_releases_are_counted_in_months() -> None:
    assert released("nemo 25.04") == 39
    assert released("v24.11.1") == 34
    assert math.isnan(released("pytorch 2.1"))
