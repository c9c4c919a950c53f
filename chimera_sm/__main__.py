"""`python -m chimera_sm`, and the `chimera_sm` command."""

from __future__ import annotations

import sys


def main() -> None:
    from chimera_sm.cli.main import run
    from chimera_sm.errors import EXIT_PIPE_CLOSED, EXIT_USAGE

    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except OSError as error:  # a reader that has gone, a full disk: the interpreter would complain again as it ends
        sys.stdout = None
        code = code or (EXIT_PIPE_CLOSED if isinstance(error, BrokenPipeError) else EXIT_USAGE)
    sys.exit(code)


if __name__ == "__main__":
    main()
