"""The same entry points with atheris, which looks for messages that reach code no message reached before.

The first two bytes of an input choose the entry point; the rest is the message, cut or filled up from an
honest one. A finding ends the run; libFuzzer keeps the input in the folder it was started in and says how to
repeat it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gradsieve.errors import ConfigError
from gradsieve_tools.fuzz.entry_points.entry_point import EntryPoint


def guide(target: str, count: int, seed: int) -> int:
    """Run in a process of its own: libFuzzer ends the one it runs in."""
    if importlib.util.find_spec("atheris") is None:
        raise ConfigError("guided fuzzing needs atheris: pip install 'gradsieve-tools[fuzz]'")
    with tempfile.TemporaryDirectory(prefix="gradsieve-corpus-") as corpus:
        command = [sys.executable, "-m", "gradsieve_tools.fuzz.guided", target, corpus, f"-runs={count}"]
        limits = [
            f"-seed={seed + 1}",
            "-timeout=20",
            "-rss_limit_mb=2048",
            "-max_len=4096",
        ]  # 0 is a random one
        return subprocess.run([*command, *limits], check=False).returncode


def chosen(entries: list[EntryPoint], data: bytes) -> tuple[EntryPoint, bytearray]:
    entry = entries[int.from_bytes(data[:2], "little") % len(entries)]
    honest = entry.honest[0]
    frame = bytearray(honest)
    frame[: len(data) - 2] = data[2 : 2 + len(honest)]
    return entry, frame[: len(honest)]


def main(target: str, corpus: str, *options: str) -> None:
    import atheris  # the `fuzz` extra

    for name in [name for name in sys.modules if name.partition(".")[0] == "gradsieve"]:
        del sys.modules[name]  # loaded without counters that show which code was reached
    with atheris.instrument_imports(include=["gradsieve"]):
        from gradsieve_tools.fuzz.entry_points.entry_point import REFUSED
        from gradsieve_tools.fuzz.targets import Cases
    entries = [entry for family in Cases(target, 0).entries for entry in family]
    for number, entry in enumerate(entries):
        start = number.to_bytes(2, "little") + entry.honest[0]
        (Path(corpus) / f"honest-{number}").write_bytes(start)

    def enter(data: bytes) -> None:
        entry, frame = chosen(entries, data.ljust(2, b"\0"))
        with contextlib.suppress(*REFUSED):
            entry.enter(frame)

    fuzzer: Any = atheris
    fuzzer.Setup([sys.argv[0], *options, corpus], enter)
    fuzzer.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
