"""Who may write a checkpoint to a folder: a run that was replaced may not, however late it wakes up.

    term-4                  a run has claimed the right to save here, as the fourth
    manifest-4.12.json      the twelfth checkpoint of that run
    manifest.json           the same, for whoever looks whether there is one

A run claims a term, larger than all before it, when it first saves to a folder: the file's exclusive creation
is the claim. Everything that it writes there has the term and a number in its name, its stamp. Readers take
the manifest with the largest stamp, and a writer removes only what has a smaller one than its own. So nothing
is ever overwritten that matters: whoever slept between the vote and the rename adds a manifest that nobody
reads, and harms none of a later term. A writer that sees a larger term than its own refuses to save.

What it takes from the file system is exclusive creation and atomic rename within a folder, which POSIX and
NFS give; no lock and no clock. Claiming and renaming change the folder, after which an NFS client reads its
names again. An object store needs a conditional put (If-None-Match) for the claim, and lists that show every
put that has returned.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gradsieve.errors import ConfigError

MANIFEST = "manifest.json"
_CLAIM = re.compile(r"term-(\d{1,15})")
_LAST = 10**15 - 1  # of terms: a larger one has a name that no pattern reads
_STAMPED = re.compile(
    r"manifest-(\d{1,15})\.(\d{1,15})\.(?:json|part)"
    r"|rank\d{5,7}-shard\d{5,7}-(\d{1,15})\.(\d{1,15})(?:-[0-9a-f]{16}\.safetensors|\.part)"
)


class Stamp(NamedTuple):
    """Of one checkpoint. Those of a later term are larger, then those of a larger number."""

    term: int
    number: int

    def __str__(self) -> str:
        return f"{self.term}.{self.number}"

    @property
    def manifest(self) -> str:
        return f"manifest-{self}.json"


class Writer:
    """One run's right to save to a folder; rank 0 has it."""

    def __init__(self) -> None:
        self._held: dict[str, Stamp] = {}

    def next(self, folder: Path) -> Stamp:
        """The stamp of the checkpoint that is about to be written there."""
        place = os.path.realpath(folder)
        last = self._held.get(place)
        if last is None or _term(folder) == 0:  # the second: somebody emptied the folder
            last = Stamp(claim(folder), 0)
        refuse_deposed(folder, last)
        stamp = self._held[place] = Stamp(last.term, last.number + 1)
        _remove(folder, stamp, {*manifests(folder)})  # what saves that broke off left: it may fill the disk
        return stamp


def claim(folder: Path) -> int:
    """A term of this folder's that nobody has or had."""
    while True:
        term = 1 + _term(folder)
        if term > _LAST:
            raise ConfigError(f"{folder} has files of term {_LAST}, after which none can come: remove them")
        with contextlib.suppress(FileExistsError):
            os.close(os.open(folder / f"term-{term}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            return term


def refuse_deposed(folder: Path, stamp: Stamp) -> None:
    term = _term(folder)
    if term > stamp.term:
        raise ConfigError(
            f"{folder} belongs to another run, which came later (term {term}, this one has {stamp.term}): "
            "end this one, or save to another folder"
        )


def manifests(folder: Path) -> list[Stamp]:
    """Of all checkpoints there, the newest first."""
    found = {stamp for stamp, name in _stamped(folder) if name == stamp.manifest}
    return sorted(found, reverse=True)


def remove_older(folder: Path, stamp: Stamp) -> None:
    """All that runs wrote there before, and claims that are worth nothing any more."""
    _remove(folder, stamp, set())


def _remove(folder: Path, stamp: Stamp, but: set[Stamp]) -> None:
    """What cannot be removed is left to the next save."""
    for old, name in list(_stamped(folder)):
        if old < stamp and old not in but:
            with contextlib.suppress(OSError):
                (folder / name).unlink()


def _stamped(folder: Path) -> Iterator[tuple[Stamp, str]]:
    """Every name of ours in it. A claim belongs to all checkpoints of its term, and goes with the last."""
    try:
        names = os.listdir(folder)
    except OSError:  # who reads a manifest there says what is wrong
        return
    for name in names:
        if found := _CLAIM.fullmatch(name):
            yield Stamp(int(found[1]), 10**15), name
        elif found := _STAMPED.fullmatch(name):
            term, number = (int(part) for part in found.groups() if part is not None)
            yield Stamp(term, number), name


def _term(folder: Path) -> int:
    """The latest, 0 if there is none."""
    return max((stamp.term for stamp, _ in _stamped(folder)), default=0)
