"""`python -m chimera_sm`, and the `chimera_sm` command."""

from __future__ import annotations

import sys


def main() -> None:
    from chimera_sm.cli.main import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
