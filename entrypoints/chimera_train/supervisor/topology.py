"""Which hosts there are, which one this is, and where rank 0 listens.

Ranks are static: host by host in the order of `Topology.hosts`. Sources, first match wins: SageMaker's
resourceconfig.json, the environment of a Slurm step, torchrun's PET_* variables (as Kubeflow's operator sets them on a
pod), one host alone.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from chimera_train.config.contract import MlRoot

from .errors import HostError

MASTER_PORT = 7777
"""SageMaker's convention."""
MASTER_ADDRESS_VARIABLE = "CHIMERA_MASTER_ADDR"
MASTER_PORT_VARIABLE = "CHIMERA_MASTER_PORT"
"""Set by the local target, whose host names resolve nowhere; they override every source."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Topology:
    """Hosts in the order of their ranks."""

    hosts: tuple[str, ...]
    node_rank: int
    master_address: str
    master_port: int
    source: str
    """Where it was read, for messages."""
    interface: str | None = None
    """Network interface between the hosts, where the platform names one."""

    @property
    def current_host(self) -> str:
        return self.hosts[self.node_rank]


def read_topology(ml: MlRoot, environment: Mapping[str, str]) -> Topology:
    """Find the topology, or raise HostError with the file or variable that is wrong."""
    if ml.resource_config.is_file():
        try:
            topology = from_resource_config(json.loads(ml.resource_config.read_text()))
        except ValueError as error:
            raise HostError(f"{ml.resource_config} is not valid JSON: {error}") from error
    elif "SLURM_NODEID" in environment:
        topology = from_slurm(environment)
    elif "PET_NNODES" in environment:
        topology = from_pod(environment)
    else:
        topology = Topology(("localhost",), 0, LOOPBACK, MASTER_PORT, "no cluster found")
    address = environment.get(MASTER_ADDRESS_VARIABLE)
    if address:
        topology = replace(topology, master_address=address)
    elif len(topology.hosts) == 1:
        topology = replace(topology, master_address=LOOPBACK)
    if port := environment.get(MASTER_PORT_VARIABLE):
        topology = replace(topology, master_port=_number(port, MASTER_PORT_VARIABLE))
    return topology


def host_order(name: str) -> tuple[str, int, str]:
    """Sort key: `algo-2` before `algo-10`. SageMaker's own list is sorted as text."""
    match = re.search(r"(\d+)$", name)
    return (name[: match.start()], int(match.group()), name) if match else (name, -1, name)


def from_resource_config(data: Any) -> Topology:
    """SageMaker's resourceconfig.json. Instance groups, where there are some, share one numbering of hosts."""
    if not isinstance(data, Mapping) or not data.get("hosts") or "current_host" not in data:
        raise HostError("resourceconfig.json lacks 'hosts' or 'current_host'")
    hosts = tuple(sorted(data["hosts"], key=host_order))
    current = data["current_host"]
    if current not in hosts:
        raise HostError(f"resourceconfig.json: current_host {current!r} is not one of hosts {', '.join(hosts)}")
    return Topology(
        hosts,
        hosts.index(current),
        hosts[0],
        MASTER_PORT,
        "resourceconfig.json",
        interface=data.get("network_interface_name") or None,
    )


def from_slurm(environment: Mapping[str, str]) -> Topology:
    """A step with one task a node. Slurm numbers nodes in the order of its own list, so that is not sorted again."""
    text = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or ""
    hosts = tuple(expand_hostlist(text)) or ("localhost",)
    node_rank = _number(environment["SLURM_NODEID"], "SLURM_NODEID")
    num_nodes = _number(
        environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES") or str(len(hosts)), "SLURM_NNODES"
    )
    if num_nodes != len(hosts):
        raise HostError(f"Slurm counts {num_nodes} nodes, but its node list {text!r} names {len(hosts)}")
    if node_rank >= len(hosts):
        raise HostError(f"SLURM_NODEID={node_rank} is not below the {len(hosts)} nodes of the step")
    if environment.get("SLURM_LOCALID", "0") != "0":
        raise HostError(
            f"launch.py was started more than once on {hosts[node_rank]} (SLURM_LOCALID="
            f"{environment['SLURM_LOCALID']}); it starts the workers itself: use srun --ntasks-per-node=1"
        )
    # Two jobs may share a node, so the port follows the job's id; below the kernel's ephemeral ports.
    port = 20_000 + _number(environment.get("SLURM_JOB_ID", "0"), "SLURM_JOB_ID") % 10_000
    return Topology(hosts, node_rank, hosts[0], port, "Slurm")


def from_pod(environment: Mapping[str, str]) -> Topology:
    """Variables of torchrun that count nodes (not workers)."""
    smallest, _, largest = environment["PET_NNODES"].partition(":")
    if largest and largest != smallest:
        raise HostError(f"PET_NNODES={environment['PET_NNODES']} is elastic; launch.py needs a fixed number of nodes")
    num_nodes = _number(smallest, "PET_NNODES")
    node_rank = _number(environment.get("PET_NODE_RANK", "0"), "PET_NODE_RANK")
    if node_rank >= num_nodes:
        raise HostError(f"PET_NODE_RANK={node_rank} is not below PET_NNODES={num_nodes}")
    address = environment.get("PET_MASTER_ADDR") or environment.get("MASTER_ADDR") or ""
    if not address and num_nodes > 1:
        raise HostError(f"PET_NNODES={num_nodes}, but neither PET_MASTER_ADDR nor MASTER_ADDR is set")
    port = environment.get("PET_MASTER_PORT") or environment.get("MASTER_PORT") or str(MASTER_PORT)
    hosts = tuple(f"node-{i}" for i in range(num_nodes))
    return Topology(hosts, node_rank, address or LOOPBACK, _number(port, "PET_MASTER_PORT"), "PET_* variables")


def expand_hostlist(text: str) -> list[str]:
    """Slurm's compressed node lists.

    >>> expand_hostlist("ip-[1,3-4]-[08-09],login")
    ['ip-1-08', 'ip-1-09', 'ip-3-08', 'ip-3-09', 'ip-4-08', 'ip-4-09', 'login']
    """
    names: list[str] = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        pieces = [_expand_range(part) for part in re.split(r"(\[[^\]]*\])", item) if part]
        names += ["".join(choice) for choice in itertools.product(*pieces)]
    return names


def _expand_range(part: str) -> list[str]:
    if not part.startswith("["):
        return [part]
    numbers: list[str] = []
    for span in part[1:-1].split(","):
        first, _, last = span.partition("-")
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last or first) + 1)]
    return numbers


def _number(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise HostError(f"{name}={text!r} is no whole number") from None
