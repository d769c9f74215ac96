"""`gradsieve`: one command, a few verbs. `commands/table.py` has them all."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import TextIO

from gradsieve import __version__
from gradsieve.errors import GradsieveError
from gradsieve_tools.cli.tree import grow
from gradsieve_tools.commands.table import COMMANDS


def main(argv: Sequence[str] | None = None) -> int:
    _hear_interruption()
    try:
        if "_ARGCOMPLETE" in os.environ:
            return _complete()
        words = sys.argv[1:] if argv is None else argv
        args = parsed(words)  # which may load torch, and take a while
        code = int(args.call(args))
        sys.stdout.flush()  # here, where a reader that has gone can be caught
        return code
    except BrokenPipeError:
        if _is_read(sys.stdout):
            raise
        return 128 + signal.SIGPIPE
    except GradsieveError as error:
        print(f"gradsieve: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _is_read(output: TextIO) -> bool:
    """Return False after `| head` has seen enough, and make further output vanish."""
    look = select.poll()
    look.register(output.fileno(), 0)  # what a poll reports unasked: the other end of a pipe was closed
    if not any(event & select.POLLERR for _, event in look.poll(0)):
        return True
    os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
    return False


def parsed(words: Sequence[str]) -> argparse.Namespace:
    return parser_for(words).parse_args(words)


def parser_for(words: Sequence[str] | None) -> argparse.ArgumentParser:
    """Return a parser with all names and the options of the command in `words`; None: of all commands."""
    parser = argparse.ArgumentParser(
        prog="gradsieve", description="Sparse gradient exchange for PyTorch: check, plan, watch, report."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    grow(parser, COMMANDS, words)
    return parser


def _complete() -> int:
    """The shell asks how the line may go on (`eval "$(register-python-argcomplete gradsieve)"`)."""
    import argcomplete

    line, end = os.environ.get("COMP_LINE", ""), os.environ.get("COMP_POINT", "")
    words = line[: int(end)].split() if end.isdigit() else line.split()
    argcomplete.autocomplete(parser_for(words[1:]))
    return 0


def _hear_interruption() -> None:
    """Handle SIGINT, which shells make background processes ignore."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    sys.exit(main())
