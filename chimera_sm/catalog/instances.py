"""Instance types with accelerators."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from chimera_train.config import nearest

from .errors import UnknownInstance
from .tables import number, rows


@dataclass(frozen=True, kw_only=True)
class Instance:
    type: str
    """SageMaker's name, `ml.p5.48xlarge`."""
    vcpus: int
    memory_gib: float
    accelerator: str
    family: str
    """What the planner's coefficients are kept by: `a100`, `h100` (H200 too), `blackwell`, `rtx_pro`, `a10g`, …"""
    accelerators: int
    accelerator_memory_gib: float
    """Of one accelerator, as DescribeInstanceTypes reports it."""
    bf16_tflops: float | None
    """Dense peak of one accelerator."""
    fp8_tflops: float | None
    memory_gb_s: float | None
    """Bandwidth of one accelerator's memory."""
    link_gb_s: float | None
    """Between accelerators of a host, one direction, each; None where there is one accelerator."""
    switched_link: bool
    """NVLink with NVSwitch, or NeuronLink; False: PCIe through the host, or a single accelerator."""
    network_gbps: float
    """Peak of the whole host."""
    efa_interfaces: int
    efa_rdma: bool
    """GPUDirect RDMA over EFA."""
    nvme_gb: float
    """0: none."""
    training: bool
    """A SageMaker TrainingInstanceType."""
    hyperpod: bool
    training_plan: bool
    source: str
    date: str
    notes: str

    @property
    def is_trainium(self) -> bool:
        return self.family == "trainium"

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """Of CUDA; None for what has none. Of a family's first GPU, which its others do not fall short of."""
        return _COMPUTE_CAPABILITY.get(self.family)


_COMPUTE_CAPABILITY = {
    # NVIDIA, "CUDA GPU Compute Capability", 2026-11.
    "a100": (8, 0),
    "a10g": (8, 6),
    "l4": (8, 9),
    "l40s": (8, 9),
    "h100": (9, 0),
    "blackwell": (10, 0),
    "rtx_pro": (12, 0),
}


@functools.cache
def _table() -> dict[str, Instance]:
    return {
        row["type"]: Instance(
            type=row["type"],
            vcpus=int(row["vcpus"]),
            memory_gib=float(row["memory_gib"]),
            accelerator=row["accelerator"],
            family=row["family"],
            accelerators=int(row["accelerators"]),
            accelerator_memory_gib=float(row["accelerator_memory_gib"]),
            bf16_tflops=number(row["bf16_tflops"]),
            fp8_tflops=number(row["fp8_tflops"]),
            memory_gb_s=number(row["memory_gb_s"]),
            link_gb_s=number(row["link_gb_s"]),
            switched_link=row["switched_link"] == "1",
            network_gbps=float(row["network_gbps"]),
            efa_interfaces=int(row["efa_interfaces"]),
            efa_rdma=row["efa_rdma"] == "1",
            nvme_gb=float(row["nvme_gb"]),
            training=row["training"] == "1",
            hyperpod=row["hyperpod"] == "1",
            training_plan=row["training_plan"] == "1",
            source=row["source"],
            date=row["date"],
            notes=row["notes"],
        )
        for row in rows("instances")
    }


def instance_types() -> tuple[str, ...]:
    """Every known type, families together, small to large."""
    return tuple(_table())


def instance(type: str) -> Instance:
    """The facts of one type.

    >>> instance("ml.p4d.24xlarge").accelerators
    8

    Raises UnknownInstance, which names the nearest known type.
    """
    try:
        return _table()[type]
    except KeyError:
        raise UnknownInstance(type, _nearest_type(type)) from None


def _nearest_type(type: str) -> str | None:
    """The type it was most likely meant to be: one of its own family first (`ml.p5.banana` → `ml.p5.48xlarge`)."""
    family = [known for known in _table() if known.rpartition(".")[0] == type.rpartition(".")[0]]
    return nearest(type, family) or (family[-1] if family else nearest(type, _table()))
