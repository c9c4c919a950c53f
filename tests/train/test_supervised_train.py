"""launch.py with the real train.py under it: what the supervisor and the loop do together."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from spawn import ENTRYPOINTS, free_port
from test_parity_train import has_steps, recipe_file, root, wait_for  # noqa: F401 (root is a fixture)

from chimera_train.config import ProfilingConfig, encode

pytestmark = pytest.mark.train


def launch(ml_root, file, env=None) -> subprocess.Popen[str]:
    code = ml_root.parent / "code"
    shutil.copytree(ENTRYPOINTS, code, ignore=shutil.ignore_patterns("__pycache__", "requirements.txt"))
    (code / "recipe.json").write_text(json.dumps(encode(replace(file, peak_tflops=None))))
    place = {"CHIMERA_ML_ROOT": str(ml_root), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return subprocess.Popen(
        [sys.executable, "-u", str(code / "launch.py")],
        env={**os.environ, **place, "OMP_NUM_THREADS": "1", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, output


def test_a_signal_to_the_supervisor_profiles_the_same_steps_on_all_ranks_that_are_named(root):  # noqa: F811
    file = recipe_file(workers=2, train={"num_steps": 100_000}, checkpoint={"interval_steps": 0})
    profiling = ProfilingConfig(num_steps=2, ranks=(0, 1))
    process = launch(root, replace(file, recipe=replace(file.recipe, profiling=profiling)))
    folder = root / "output/data/profile"
    wait_for(has_steps(root, 3), [process])
    process.send_signal(signal.SIGUSR2)
    wait_for(lambda: len(list(folder.glob("*.json.gz"))) == 2, [process])
    time.sleep(0.5)  # the second file may still be written
    process.send_signal(signal.SIGTERM)
    code, output = ended(process)
    assert code == 143, output
    paths = sorted(folder.glob("*"))
    first = int(paths[0].name.split("-")[1])
    assert [path.name for path in paths] == [f"step-{first}-rank-{rank}.json.gz" for rank in (0, 1)]
    for path in paths:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        assert sum(event.get("name") == "gloo:all_reduce" for event in events) >= 2
        assert f"profile of step {first} and after: {path}" in output


def test_a_loss_that_is_not_finite_in_the_first_step_fails_every_rank_and_is_told(root):  # noqa: F811
    code, output = ended(launch(root, recipe_file(workers=2, model={"initializer_range": 1e30})))
    assert code == 1, output
    assert output.count("NotFinite: step 1:") >= 2
    told = (root / "output/failure").read_text()
    assert "NotFinite: step 1:" in told
    assert "There is no checkpoint yet" in told
    assert "optim.learning_rate=" in told
    assert "Traceback" not in told
    assert "Traceback" in output
    assert not list((root / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(("death", "exit_code"), [("os.kill(os.getpid(), 9)", 75), ("os._exit(1)", 1)])
def test_a_rank_that_dies_before_it_joins_ends_the_host_at_once(root, death, exit_code):  # noqa: F811
    site = root.parent / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(f"import os\nif os.environ.get('RANK') == '1':\n    {death}\n")
    started = time.monotonic()
    code, output = ended(launch(root, recipe_file(workers=2), env={"PYTHONPATH": str(site)}))
    assert code == exit_code, output
    assert time.monotonic() - started < 40
    assert (root / "output/failure").read_text().startswith("rank 1 on ")
