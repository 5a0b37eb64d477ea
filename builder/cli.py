"""The console script `dspark-build`: the thin part that works before the build packages are known to be there."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from runtime.console import guarded


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `dspark-build` with `arguments` (default: the process's) and return the exit code.

    0 success, 1 an error the user can mend (one line on stderr), 2 wrong usage, 130 interrupted.
    """
    return guarded(lambda: _run(arguments), extra="build")


def _run(arguments: Sequence[str] | None) -> int:
    # Inside the guard, so that a missing click or rich is one line with the remedy.
    import click

    from builder.commands import group

    try:
        result = group.main(args=arguments, prog_name="dspark-build", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        raise KeyboardInterrupt from None
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    sys.exit(main())
