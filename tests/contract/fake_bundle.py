"""A bundle whose train.py is a few lines of standard library: what the supervisor and the local target are tested with.

The fake worker counts steps in its host's checkpoint folder, one file a step and rank, and does as the JSON in FAKE is:
{"steps": 20, "step_s": 0.05, "save_s": 0.2, "ignore_sigterm": true, "ranks": {"1": {"at": 3, "do": "exit 1"}}}
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from chimera_sm.paths import entrypoints_dir

TRAIN = r"""
import json, os, signal, subprocess, sys, time
from pathlib import Path

fake = json.loads(os.environ.get("FAKE", "{}"))
rank = int(os.environ["RANK"])
ml = Path(os.environ["CHIMERA_ML_ROOT"])
if "start_s" in fake:
    time.sleep(fake["start_s"])
stop = False


def on_sigterm(number, frame):
    global stop
    print("worker got SIGTERM", flush=True)
    stop = not fake.get("ignore_sigterm")


signal.signal(signal.SIGTERM, on_sigterm)
if fake.get("orphan"):  # a grandchild that ends after its parent: PID 1 inherits it
    subprocess.run(["sh", "-c", "sleep 0.3 &"], check=True)
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT",
         "CHIMERA_RUN_ID", "CHIMERA_ATTEMPT", "CHIMERA_GRACE_S"]
print("env " + json.dumps({n: os.environ.get(n) for n in names}), flush=True)
steps = ml / "checkpoints"
mine = f"host{os.environ['NODE_RANK']}-rank{rank}"
done = len(list(steps.glob(f"step-*/{mine}")))
metrics = ml / "output" / "data" / "metrics" / "host-0.jsonl"


def save(step):
    folder = steps / f"step-{step:04d}"
    folder.mkdir(exist_ok=True)
    (folder / mine).write_text(f"{step}\n" * 1000)


action = fake.get("ranks", {}).get(str(rank), {})
once = ml / "acted"
for step in range(done + 1, fake.get("steps", 10) + 1):
    time.sleep(fake.get("step_s", 0.02))
    if action and step == action["at"] and not (action.get("once") and once.exists()):
        once.touch()
        verb, _, value = action["do"].partition(" ")
        if verb == "signal":
            os.kill(os.getpid(), int(value))
            time.sleep(60)
        if verb == "raise":
            error = {"rank": rank, "time": time.time(), "exit_code": 1, "message": value, "traceback": "line\n" * 900}
            Path(os.environ["CHIMERA_ERROR_FILE"]).write_text(json.dumps(error))
            sys.exit(1)
        sys.exit(int(value))
    if rank == 0:
        with metrics.open("a") as file:
            file.write(json.dumps({"step": step, "loss": 1 / step, "tokens_per_s": 100.0, "step_s": 0.5}) + "\n")
    print(f"chimera step={step} loss={1 / step}", flush=True)
    save(step)
    if stop:
        (steps / f"step-{step:04d}" / "manifest.json").write_text("{}")
        time.sleep(fake.get("save_s", 0.0))
        (ml / "checkpoints" / f"saved-rank-{rank}").write_text(str(step))
        sys.exit(143)
"""


def recipe_json(hosts: int, workers: int, **extra: Any) -> bytes:
    """A valid recipe.json for the layout."""
    recipe = {
        "name": "fake",
        "model": {
            "name": "m",
            "vocab_size": 64,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_layers": 1,
            "num_heads": 1,
            "num_kv_heads": 1,
        },
        "parallel": {},
        "train": {"num_steps": 20, "global_batch_size": 8, "micro_batch_size": 1, "sequence_length": 8},
        "data": {"name": "d"},
        "optim": {"learning_rate": 1e-3},
        "precision": {"name": "fp32"},
        "checkpoint": {"interval_steps": 5},
    }
    layout = {"hosts": hosts, "workers_per_host": workers}
    return json.dumps({"recipe": recipe, "layout": layout, "recipe_hash": "0" * 64, **extra}).encode()


def bundle_files(hosts: int, workers: int) -> dict[str, bytes]:
    """The real launch.py and chimera_train, the fake train.py."""
    root = entrypoints_dir()
    files = {
        str(path.relative_to(root)): path.read_bytes()
        for path in [root / "launch.py", *root.glob("chimera_train/**/*.py")]
    }
    return {**files, "train.py": TRAIN.encode(), "recipe.json": recipe_json(hosts, workers)}


def write_host(ml: Path, hosts: int, workers: int, current: str = "algo-1") -> Path:
    """Lay out one host's /opt/ml; returns the folder of the code."""
    code = ml / "input" / "data" / "code"
    for name, content in bundle_files(hosts, workers).items():
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        (code / name).write_bytes(content)
    config = ml / "input" / "config"
    config.mkdir(parents=True)
    names = sorted(f"algo-{i}" for i in range(1, hosts + 1))
    (config / "resourceconfig.json").write_text(json.dumps({"current_host": current, "hosts": names}))
    return code


def host_environment(ml: Path, fake: Mapping[str, Any], **extra: str) -> dict[str, str]:
    return {
        **{k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "TMPDIR")},
        "CHIMERA_ML_ROOT": str(ml),
        "CUDA_VISIBLE_DEVICES": "",
        "CHIMERA_GRACE_S": "10",
        "FAKE": json.dumps(fake),
        **extra,
    }


def start_host(
    ml: Path, fake: Mapping[str, Any], *, prefix: tuple[str, ...] = (), **extra: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*prefix, sys.executable, "-u", str(ml / "input" / "data" / "code" / "launch.py")],
        env=host_environment(ml, fake, **extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(condition: Callable[[], Any], seconds: float = 20.0, what: str = "it") -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"waited {seconds} s for {what} in vain")


def can_unshare() -> bool:
    """Whether this user may make a PID namespace."""
    tool = shutil.which("unshare")
    return tool is not None and subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode == 0


UNSHARE = ("unshare", "--pid", "--fork", "--mount-proc", *(() if os.getuid() == 0 else ("--map-root-user",)))
