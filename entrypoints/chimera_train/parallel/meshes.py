"""Torch's views of the one factorisation of the world, `MeshLayout`.

Two meshes lie over the same ranks. The dense one is (pipeline, data_parallel, shard, tensor) with shard =
fully_sharded × context: dense parameters are split over tensor and shard. In the expert one, (pipeline, data_parallel,
expert_shard, expert), the ranks shard × tensor are factored anew: all of them hold different tokens of a mixture of
experts.
Axes of degree 1 are left out, but for the one that FSDP shards over.
"""

from __future__ import annotations

import functools

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..config import MeshLayout
from ..config.mesh import AXES

REPLICATE, SHARD = "data_parallel", "shard"


class Meshes:
    """Collective to construct, and so is the first use of every view: use it on all ranks alike."""

    def __init__(self, layout: MeshLayout, device_type: str):
        self.layout = layout
        self.device_type = device_type
        self.rank = dist.get_rank()
        self.at = layout.coordinates(self.rank)
        """Axis → this rank's coordinate."""
        self._groups: dict[frozenset[str], dist.ProcessGroup] = {}
        self._dense = self._mesh(
            pipeline=layout.pipeline, data_parallel=layout.data_parallel, shard=layout.shard, tensor=layout.tensor
        )

    def _mesh(self, **degrees: int) -> DeviceMesh:
        shard = [name for name in degrees if name.endswith(SHARD)]
        used = {name: degree for name, degree in degrees.items() if degree > 1 or name in shard}
        return init_device_mesh(self.device_type, tuple(used.values()), mesh_dim_names=tuple(used))

    @functools.cached_property
    def fsdp(self) -> DeviceMesh:
        """What dense parameters are sharded over: (shard,), or (data_parallel, shard) where there are replicas."""
        return self._dense[(REPLICATE, SHARD)] if self.layout.data_parallel > 1 else self._dense[SHARD]

    @functools.cached_property
    def tensor(self) -> DeviceMesh:
        """(tensor,), of a degree above 1."""
        return self._dense["tensor"]

    @functools.cached_property
    def _experts(self) -> DeviceMesh:
        layout = self.layout
        return self._mesh(
            pipeline=layout.pipeline,
            data_parallel=layout.data_parallel,
            expert_shard=layout.expert_shard,
            expert=layout.expert,
        )

    def make_expert_mesh(self) -> None:
        """On all ranks at once: a stage of dense layers alone has no other use for it."""
        _ = self._experts

    @functools.cached_property
    def expert_fsdp(self) -> DeviceMesh:
        """What a rank's experts are sharded over: (expert_shard,), or (data_parallel, expert_shard)."""
        if self.layout.data_parallel > 1:
            return self._experts[(REPLICATE, "expert_shard")]
        return self._experts["expert_shard"]

    @functools.cached_property
    def expert(self) -> DeviceMesh:
        """(expert,), of a degree above 1: the ranks among which tokens travel to their experts."""
        return self._experts["expert"]

    def group(self, *axes: str) -> dist.ProcessGroup:
        """This rank's group along `axes`: the ranks that differ from it in these coordinates alone, in rank order."""
        key = frozenset(axes)
        if key not in self._groups:
            rows: dict[tuple[int, ...], list[int]] = {}
            for rank in self.layout.ranks():
                at = self.layout.coordinates(rank)
                rows.setdefault(tuple(at[axis] for axis in AXES if axis not in key), []).append(rank)
            self._groups[key], _ = dist.new_subgroups_by_enumeration(list(rows.values()))
        return self._groups[key]

    def all_groups(self) -> list[dist.ProcessGroup]:
        """Every group that was made so far."""
        meshes = [self._dense, *([self._experts] if "_experts" in self.__dict__ else [])]
        return [group for mesh in meshes for group in mesh.get_all_groups()] + list(self._groups.values())

    @property
    def reports_loss(self) -> bool:
        """Whether this rank's sums of losses and tokens count: those of other ranks are copies, or none at all."""
        last = self.layout.rank_of_stage(self.layout.num_stages - 1)
        return self.at["tensor"] == 0 and self.at["pipeline"] == last
