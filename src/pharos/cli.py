"""The ``pharos`` command: what is useful outside of the workflow."""

import argparse
import json
import os
import sys
from collections.abc import Sequence

from pharos import __version__
from pharos.errors import PharosError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; return 0, 1 for a failed check, 2 for a refused input."""
    parser = build_parser()
    try:
        chosen, rest = parser.parse_known_args(arguments)
        if "rest" in chosen:
            chosen.rest = rest
        elif rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        status: int = chosen.run(chosen)
        sys.stdout.flush()
        return status
    except PharosError as error:
        print(f"pharos: error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # The reader (head, less) is gone; leave Python nothing to flush into the void.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    """Make the command line's parser."""
    from pharos.cluster import doctor, plan, rightsize, submit
    from pharos.gate import command as gate_command
    from pharos.gate import compare
    from pharos.models import command as models_command

    parser = argparse.ArgumentParser(prog="pharos", description=__doc__)
    parser.add_argument("--version", action="version", version=f"pharos {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    gate_command.add_parser(subparsers)
    compare.add_parser(subparsers)
    models_command.add_parser(subparsers)
    doctor.add_parser(subparsers)
    plan.add_parser(subparsers)
    rightsize.add_parser(subparsers)
    submit.add_parser(subparsers)
    context = subparsers.add_parser(
        "context", help="print the CPUs, thread limits and pools a job would get here"
    )
    context.add_argument("--threads", type=int, default=1, help="threads to bind (default: 1)")
    context.set_defaults(run=_context)
    return parser


def _context(arguments: argparse.Namespace) -> int:
    from pharos.errors import InputError
    from pharos.runtime.context import run_context
    from pharos.runtime.threads import bind_threads

    if arguments.threads < 1:
        raise InputError(f"--threads: {arguments.threads} is less than 1")
    binding = bind_threads(arguments.threads)
    import numpy  # noqa: F401  (so that its pool is there to be read)

    print(json.dumps(run_context(binding), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
