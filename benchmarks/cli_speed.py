"""How long the commands take that people wait for: median and spread of fresh processes.

python benchmarks/cli_speed.py [REPEATS]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

CASES = {
    "python -c pass": ["-c", "pass"],
    "import chimera_sm": ["-c", "import chimera_sm"],
    "chimera_sm --help": ["-m", "chimera_sm", "--help"],
    "recipes": ["-m", "chimera_sm", "recipes"],
    "plan recipe=70b": ["-m", "chimera_sm", "plan", "recipe=70b"],
    "launch recipe=70b --dry-run --json": [
        *["-m", "chimera_sm", "launch", "recipe=70b", "target=sagemaker", "--dry-run", "--json"]
    ],
}


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    results = {}
    print(f"{'command':<38} {'median':>8} {'min':>8} {'max':>8}   seconds, {repeats} fresh processes")
    for name, arguments in CASES.items():
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - start)
        results[name] = {"median_s": statistics.median(times), "min_s": min(times), "max_s": max(times)}
        print(f"{name:<38} {statistics.median(times):8.3f} {min(times):8.3f} {max(times):8.3f}")
    out = Path("build/benchmarks")
    out.mkdir(parents=True, exist_ok=True)
    (out / "cli_speed.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
