"""`gradsieve watch`: a running job, from the records it writes."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gradsieve.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from gradsieve_tools.watch.follow import Folder

_LEAST = 0.1


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
