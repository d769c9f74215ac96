"""`gradsieve watch`: a running job, from the records it writes."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from gradsieve.errors import ConfigError
from gradsieve_tools.cli.arguments import describe

if TYPE_CHECKING:
    from rich.console import Console

    from gradsieve_tools.watch.follow import Folder

_DESCRIPTION = """\
Watch a running job, from the records it writes (`gradsieve.record`, or --record of a bench).

Only files are read: the job does not notice. The folder may still be empty, ranks may stop, last lines may be
half written. q or Ctrl-C ends it.

shown, of the last 50 steps, means over ranks:
  steps/s               of training
  loss                  if the training notes it
  bits a parameter      moved by a rank in a step
  density, threshold    share of the elements that is sent, and above which size
  imbalance f(t)        longest selection over the mean; 1 is balanced
  share of ranks cut    that could not send all they selected
  age, norm             of the residual; taken every 50 steps, unless the recorder was given another number
  exchange              ms a step by stage, and for how long the training waited
  slowest               the rank that the others wait for in collectives
"""
_EXAMPLES = """\
examples:
  gradsieve watch rec
  gradsieve watch rec --once >> job.log
"""
_LEAST = 0.1


def fill(parser: argparse.ArgumentParser) -> None:
    describe(parser, run, _DESCRIPTION, _EXAMPLES)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the job writes its records")
    parser.add_argument("--once", action="store_true", help="print one frame and end, for scripts")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="between two looks (default: 1)"
    )


def run(args: argparse.Namespace) -> int:
    if not args.interval >= _LEAST:
        raise ConfigError(f"--interval is at least {_LEAST} s")
    if args.folder.is_file():
        raise ConfigError(f"{args.folder} is a file: name the folder that it is in")
    from rich.console import Console

    from gradsieve_tools.watch.follow import Folder
    from gradsieve_tools.watch.frame import frame

    folder, console = Folder(args.folder), Console(highlight=False)
    if args.once:
        folder.look()
        console.print(frame(folder))
        return 0
    if not console.is_terminal:
        raise ConfigError("this is no terminal: --once prints one frame")
    return _live(folder, console, args.interval)


def _live(folder: Folder, console: Console, interval: float) -> int:
    from rich.live import Live

    from gradsieve_tools.watch.frame import frame

    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                folder.look()
                live.update(frame(folder), refresh=True)
                if pressed(interval) == "q":
                    return 0
        except KeyboardInterrupt:  # how a view is left, not an error
            return 0


Pressed = Callable[[float], str]  # the key that is pressed within so many seconds, or ""


@contextmanager
def _keys() -> Iterator[Pressed]:
    """Single keys, where there is a keyboard; the terminal is afterwards as it was."""
    if not sys.stdin.isatty():
        yield _sleep
        return
    import select
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return sys.stdin.read(1) if ready else ""

    try:
        yield pressed
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _sleep(seconds: float) -> str:
    time.sleep(seconds)
    return ""
