"""launch.py as the container's entry point: exit codes, signals, grace, output, failure file."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from fake_bundle import UNSHARE, can_unshare, recipe_json, start_host, wait_for, write_host


def finish(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=60)
    return out


def failure(ml: Path) -> str:
    return (ml / "output" / "failure").read_text()


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def children_of(pid: int) -> list[int]:
    """Zombies included."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_finishes_with_the_environment_of_torchrun(tmp_path: Path) -> None:
    write_host(tmp_path, 1, 2)
    process = start_host(tmp_path, {"steps": 3}, CHIMERA_RUN_ID="r-1")
    out = finish(process)
    assert process.returncode == 0, out
    env = json.loads(next(line for line in out.splitlines() if line.startswith("env ")).removeprefix("env "))
    assert env["RANK"] == "0"
    assert env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"] == "2"
    assert env["MASTER_ADDR"] == "127.0.0.1"
    assert env["CHIMERA_RUN_ID"] == "r-1"
    assert "\nchimera step=3 loss=" in out, "the host's first worker prints plain lines"
    assert "\n[rank 1] chimera step=3 loss=" in out
    log = (tmp_path / "output" / "data" / "logs" / "rank-1.log").read_text()
    assert "\nchimera step=3" in log
    assert not (tmp_path / "output" / "failure").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_stop_reaches_workers_once_and_they_have_time_to_save(tmp_path: Path, number: int) -> None:
    write_host(tmp_path, 1, 2)
    process = start_host(tmp_path, {"steps": 10_000, "save_s": 2.0})
    wait_for(lambda: len(list((tmp_path / "checkpoints" / "step-0003").glob("host0-rank*"))) == 2)
    process.send_signal(number)
    time.sleep(0.3)
    process.send_signal(number)
    out = finish(process)
    assert process.returncode == 143, out
    assert out.count("worker got SIGTERM") == 2, "two workers, one signal each"
    assert {p.name for p in tmp_path.glob("checkpoints/saved-*")} == {"saved-rank-0", "saved-rank-1"}
    assert not (tmp_path / "output" / "failure").exists()


def test_a_worker_that_does_not_save_in_time_is_killed(tmp_path: Path) -> None:
    write_host(tmp_path, 1, 2)
    process = start_host(tmp_path, {"steps": 10_000, "ignore_sigterm": True}, CHIMERA_GRACE_S="2")
    wait_for(lambda: (tmp_path / "checkpoints" / "step-0003").is_dir())
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    out = finish(process)
    assert process.returncode == 75, out
    assert 1.5 < time.monotonic() - started < 9.0
    assert "had not saved after 2 s" in failure(tmp_path)


def test_sigterm_before_the_workers_are_ready(tmp_path: Path) -> None:
    """Python's start, before train.py has its handler: nothing to save, and no failure."""
    write_host(tmp_path, 1, 1)
    process = start_host(tmp_path, {"start_s": 30})
    wait_for(lambda: children_of(process.pid))
    process.send_signal(signal.SIGTERM)
    out = finish(process)
    assert process.returncode == 143, out


@pytest.mark.parametrize(
    ("do", "exit_code", "told"),
    [
        ("raise ValueError: bad data", 1, "rank 1 on algo-1: ValueError: bad data (exit code 1)\n…"),
        ("exit 1", 1, "rank 1 on algo-1 left with exit code 1 and no report\n"),
        ("exit 3", 1, "left with exit code 3"),
        ("exit 75", 75, "left with exit code 75"),
        ("signal 9", 75, "rank 1 on algo-1 was killed by SIGKILL (out of memory?"),
        ("signal 11", 75, "SIGSEGV"),
        ("signal 7", 75, "/dev/shm"),
    ],
)
def test_the_first_failure_ends_the_host(tmp_path: Path, do: str, exit_code: int, told: str) -> None:
    write_host(tmp_path, 1, 3)
    process = start_host(tmp_path, {"steps": 10_000, "ranks": {"1": {"at": 3, "do": do}}})
    out = finish(process)
    assert process.returncode == exit_code, out
    assert failure(tmp_path).startswith(told) or told in failure(tmp_path)
    assert len(failure(tmp_path)) <= 1024


def test_a_worker_that_hangs_after_another_failed_is_killed(tmp_path: Path) -> None:
    write_host(tmp_path, 1, 2)
    fake = {"steps": 10_000, "ignore_sigterm": True, "ranks": {"0": {"at": 2, "do": "exit 75"}}}
    started = time.monotonic()
    process = start_host(tmp_path, fake)
    finish(process)
    assert process.returncode == 75
    assert time.monotonic() - started < 20


def test_workers_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    write_host(tmp_path, 1, 2)
    process = start_host(tmp_path, {"steps": 10_000})
    wait_for(lambda: (tmp_path / "checkpoints" / "step-0002").is_dir())
    pids = children_of(process.pid)
    assert len(pids) == 2
    process.kill()
    process.wait()
    wait_for(lambda: not any(alive(pid) for pid in pids), 5.0, "the workers to die")


def test_a_lost_parent_is_a_request_to_stop(tmp_path: Path) -> None:
    write_host(tmp_path, 1, 1)
    process = start_host(tmp_path, {"steps": 10_000}, CHIMERA_PARENT_PID="999999")
    out = finish(process)
    assert process.returncode == 143, out


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("recipe.json", b"{", "is no valid recipe"),
        ("recipe.json", b'{"recipe": {}, "layout": {}, "recipe_hash": ""}', "layout.hosts: is required"),
        ("recipe.json", recipe_json(2, 1), "planned for 2 hosts, but resourceconfig.json has 1: algo-1"),
        ("recipe.json", recipe_json(1, 2, peak_tflops=312.0), "only 0 accelerators were found"),
        ("requirements.txt", b"chimera-no-such-thing\n", "not installed here: chimera-no-such-thing"),
    ],
)
def test_what_is_wrong_before_the_start_is_told(tmp_path: Path, file: str, content: bytes, told: str) -> None:
    code = write_host(tmp_path, 1, 1)
    (code / file).write_bytes(content)
    process = start_host(tmp_path, {}, CHIMERA_REQUIREMENTS="check")
    out = finish(process)
    assert process.returncode == 1, out
    assert told in out
    assert told in failure(tmp_path)


def test_missing_requirements_come_from_the_bundles_wheels(tmp_path: Path) -> None:
    code = write_host(tmp_path, 1, 1)
    (code / "requirements.txt").write_text("chimera-no-such-thing==1.0\n")
    (code / "wheels").mkdir()
    process = start_host(tmp_path, {})
    out = finish(process)
    assert process.returncode == 1, out
    assert "from the bundle's wheels" in out
    assert "wheels/ lacks it" in failure(tmp_path)


def test_a_master_that_does_not_resolve_yet_is_waited_for(tmp_path: Path) -> None:
    write_host(tmp_path, 2, 1)
    process = start_host(tmp_path, {}, CHIMERA_MASTER_ADDR="no-such-host.invalid")
    time.sleep(2.0)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    out = finish(process)
    assert process.returncode == 143, out
    assert "does not resolve yet" in out


def test_the_port_is_told_to_workers(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    write_host(tmp_path, 1, 1)
    out = finish(start_host(tmp_path, {"steps": 1}, CHIMERA_MASTER_PORT=str(port)))
    assert f'"MASTER_PORT": "{port}"' in out


@pytest.mark.needs_root
def test_as_pid_1_of_a_namespace(tmp_path: Path) -> None:
    """SageMaker starts the entry point as PID 1, where a signal without a handler does nothing."""
    if not can_unshare():
        message = "no right to make a PID namespace (root, or user namespaces)"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    write_host(tmp_path, 1, 2)
    process = start_host(tmp_path, {"steps": 10_000, "save_s": 1.0, "orphan": True}, prefix=UNSHARE)
    wait_for(lambda: (tmp_path / "checkpoints" / "step-0003").is_dir())
    (pid_1,) = children_of(process.pid)  # unshare's child
    wait_for(lambda: len(children_of(pid_1)) == 2, 5.0, "the orphans to be reaped")
    status = Path(f"/proc/{pid_1}/status").read_text()
    assert status.split("NSpid:")[1].split("\n")[0].split()[-1] == "1"
    os.kill(pid_1, signal.SIGTERM)
    started = time.monotonic()
    out = finish(process)
    assert process.returncode == 143, out
    assert time.monotonic() - started < 8.0
    assert {p.name for p in tmp_path.glob("checkpoints/saved-*")} == {"saved-rank-0", "saved-rank-1"}
