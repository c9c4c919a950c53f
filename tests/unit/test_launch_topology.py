"""Which hosts, in which order, and where rank 0 listens."""

from __future__ import annotations

import json
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chimera_train.config.contract import MlRoot
from chimera_train.supervisor.errors import HostError
from chimera_train.supervisor.host import with_user_code
from chimera_train.supervisor.topology import (
    expand_hostlist,
    from_pod,
    from_resource_config,
    from_slurm,
    host_order,
    read_topology,
)
from chimera_train.supervisor.worker import worker_environment


@given(count=st.integers(1, 130), seed=st.integers(0, 1000))
def test_hosts_are_ordered_by_number_whatever_the_order_of_the_file(count: int, seed: int) -> None:
    names = [f"algo-{i}" for i in range(1, count + 1)]
    shuffled = names[:]
    random.Random(seed).shuffle(shuffled)
    for listing in (sorted(names), shuffled):
        for current in (names[0], names[-1]):
            topology = from_resource_config({"current_host": current, "hosts": listing})
            assert list(topology.hosts) == names
            assert topology.node_rank == names.index(current)
            assert topology.master_address == "algo-1"


@given(st.lists(st.text("abc-019", min_size=1, max_size=8), unique=True))
def test_host_order_is_total(names: list[str]) -> None:
    backwards = names[::-1]
    assert sorted(names, key=host_order) == sorted(backwards, key=host_order)


def test_resource_config_with_groups_and_interface(tmp_path) -> None:
    ml = MlRoot(tmp_path)
    ml.config.mkdir(parents=True)
    ml.resource_config.write_text(
        json.dumps(
            {
                "current_group_name": "workers",
                "current_host": "algo-3",
                "current_instance_type": "ml.p5.48xlarge",
                "hosts": ["algo-1", "algo-2", "algo-3"],
                "instance_groups": [
                    {"instance_group_name": "a", "instance_type": "ml.p5.48xlarge", "hosts": ["algo-2"]},
                    {"instance_group_name": "b", "instance_type": "ml.p5.48xlarge", "hosts": ["algo-3", "algo-1"]},
                ],
                "network_interface_name": "lo",
            }
        )
    )
    topology = read_topology(ml, {"SLURM_NODEID": "7"})  # the file wins
    assert (topology.node_rank, topology.master_address, topology.master_port) == (2, "algo-1", 7777)
    env = worker_environment(topology, 5, 8, tmp_path / "e", {"GLOO_SOCKET_IFNAME": "mine", "OMP_NUM_THREADS": "3"})
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], env["GROUP_RANK"]) == ("21", "24", "8", "2")
    assert env["NCCL_HOSTID"] == "algo-3"
    assert env["NCCL_SOCKET_IFNAME"] == "lo"
    assert (env["GLOO_SOCKET_IFNAME"], env["OMP_NUM_THREADS"]) == ("mine", "3"), "the user's own settings stay"


def test_an_interface_that_does_not_exist_is_not_set(tmp_path) -> None:
    topology = from_resource_config(
        {"current_host": "algo-1", "hosts": ["algo-1"], "network_interface_name": "ethwe99"}
    )
    assert "NCCL_SOCKET_IFNAME" not in worker_environment(topology, 0, 1, tmp_path / "e", {})


def test_the_teams_own_code_is_importable_by_the_workers(tmp_path) -> None:
    assert with_user_code(tmp_path, {"PYTHONPATH": "/theirs"}) == {"PYTHONPATH": "/theirs"}
    (tmp_path / "user").mkdir()
    assert with_user_code(tmp_path, {}) == {"PYTHONPATH": str(tmp_path / "user")}
    assert with_user_code(tmp_path, {"PYTHONPATH": "/theirs"}) == {"PYTHONPATH": f"{tmp_path / 'user'}:/theirs"}


def test_explicit_master_overrides_the_file(tmp_path) -> None:
    ml = MlRoot(tmp_path)
    ml.config.mkdir(parents=True)
    ml.resource_config.write_text(json.dumps({"current_host": "algo-2", "hosts": ["algo-1", "algo-2"]}))
    topology = read_topology(ml, {"CHIMERA_MASTER_ADDR": "127.0.0.1", "CHIMERA_MASTER_PORT": "4242"})
    assert (topology.master_address, topology.master_port, topology.node_rank) == ("127.0.0.1", 4242, 1)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "not valid JSON"),
        ("{}", "lacks 'hosts'"),
        ('{"hosts": ["algo-1"], "current_host": "algo-9"}', "'algo-9' is not one of hosts algo-1"),
    ],
)
def test_broken_resource_config(tmp_path, content: str, complaint: str) -> None:
    ml = MlRoot(tmp_path)
    ml.config.mkdir(parents=True)
    ml.resource_config.write_text(content)
    with pytest.raises(HostError, match=re.escape(complaint)):
        read_topology(ml, {})


def test_one_host_alone(tmp_path) -> None:
    topology = read_topology(MlRoot(tmp_path), {})
    assert (len(topology.hosts), topology.node_rank, topology.master_address) == (1, 0, "127.0.0.1")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("a,b", ["a", "b"]),
        ("ip-10-0-[7-10]", ["ip-10-0-7", "ip-10-0-8", "ip-10-0-9", "ip-10-0-10"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1,3]n[1-2],login", ["r1n1", "r1n2", "r3n1", "r3n2", "login"]),
        ("gpu-st-p5-[1-2],gpu-dy-p5-[4]", ["gpu-st-p5-1", "gpu-st-p5-2", "gpu-dy-p5-4"]),
    ],
)
def test_slurm_hostlists(text: str, names: list[str]) -> None:
    assert expand_hostlist(text) == names


def test_slurm_step() -> None:
    base = {"SLURM_NODEID": "2", "SLURM_NNODES": "3", "SLURM_JOB_NODELIST": "n[9-11]", "SLURM_JOB_ID": "123456"}
    topology = from_slurm(base)
    assert (topology.current_host, topology.master_address, topology.master_port) == ("n11", "n9", 23456)
    step = from_slurm({**base, "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "n10", "SLURM_STEP_NUM_NODES": "1"})
    assert step.hosts == ("n10",), "a step may use fewer nodes than its job"
    with pytest.raises(HostError, match="more than once on n11"):
        from_slurm({**base, "SLURM_LOCALID": "1"})
    with pytest.raises(HostError, match="counts 4 nodes"):
        from_slurm({**base, "SLURM_NNODES": "4"})


def test_pod() -> None:
    topology = from_pod({"PET_NNODES": "4", "PET_NODE_RANK": "3", "PET_MASTER_ADDR": "run-worker-0"})
    assert (len(topology.hosts), topology.node_rank, topology.master_address) == (4, 3, "run-worker-0")
    assert from_pod({"PET_NNODES": "2:2", "MASTER_ADDR": "m", "MASTER_PORT": "5"}).master_port == 5
    for wrong, complaint in (
        ({"PET_NNODES": "1:4"}, "elastic"),
        ({"PET_NNODES": "two"}, "no whole number"),
        ({"PET_NNODES": "2"}, "MASTER_ADDR"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "2", "MASTER_ADDR": "m"}, "not below"),
    ):
        with pytest.raises(HostError, match=complaint):
            from_pod(wrong)
