"""A real training run on this machine, through an interruption, in the SDK's own words.

The corpus is the source code of the running Python's standard library; the tokenizer is trained on it; nothing is
downloaded. Two simulated hosts train `recipe=tiny` with FSDP under SageMaker's container contract.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time

import chimera_sm as ch
from chimera_sm.runs.progress import watch


def main() -> None:
    recipe = ch.compose(["recipe=tiny", *sys.argv[1:]])
    plan = ch.plan(recipe)
    half = recipe.train.num_steps // 2

    run = ch.launch(plan)
    print(f"run {run.id}: {plan.num_parameters:,} parameters, {plan.layout.world_size} workers", flush=True)
    watch(run.status, until=lambda status: (status.step or 0) >= half)
    print(f"\n--- stopping at step {run.status().step}: SIGTERM, as a spot reclaim would", flush=True)
    run.stop()
    while not run.status().ended:
        time.sleep(0.2)
    print(f"--- {run.status().state} at step {run.status().step}; resuming", flush=True)
    run.resume()
    watch(run.status)
    run.wait()

    metrics = run.metrics()
    uniform = math.log(recipe.model.vocab_size)
    last = [m["loss"] for m in metrics[-50:]]
    print(
        f"\nloss {metrics[0]['loss']:.3f} → {sum(last) / len(last):.3f} (mean of the last {len(last)} steps); ", end=""
    )
    print(f"a uniform guess is ln({recipe.model.vocab_size}) = {uniform:.3f}, half of it {uniform / 2:.3f}", flush=True)
    command = [sys.executable, "-m", "chimera_sm", "generate", run.id, "--prompt", "def ", "--seed", "7"]
    print(f"\n$ {' '.join(['chimera_sm', *command[3:]])}", flush=True)
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
