"""The supervisor of one host: PID 1 of a training container, or a plain step on Slurm.

    python3 -u launch.py

Reads the topology (SageMaker's resourceconfig.json, Slurm's or torchrun's environment), starts one train.py an
accelerator, forwards SIGTERM and gives the workers their grace period, and tells the first failure in
`<ml root>/output/failure`. Exit codes: 0 finished, 143 stopped with state saved, 1 failed, 75 failed but worth a retry.
Standard library only.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from chimera_train.config.contract import MlRoot
from chimera_train.supervisor.host import run_host
from chimera_train.supervisor.signals import Signals


def main() -> int:
    signals = Signals(os.environ)
    signals.install()
    return run_host(Path(__file__).resolve().parent, MlRoot(), os.environ, signals)


if __name__ == "__main__":
    sys.exit(main())
