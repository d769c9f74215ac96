"""Fencing tokens: a run that was superseded cannot harm a checkpoint, however late it wakes up.

    term-4                  a run has claimed the right to save here, as the fourth
    manifest-4.12.json      the twelfth checkpoint of that run; its token is 4.12
    manifest.json           the same, for users who look whether there is a checkpoint

A run claims a term, larger than all before it, when it first saves to a folder: the file's exclusive creation
is the claim. All files of a checkpoint have its token in their names. Readers take the manifest with the
largest token, and a writer removes only files with smaller tokens than its own. So no file that matters is
overwritten: a run that slept between the vote and the rename adds a manifest that readers pass over. A writer
that sees a larger term than its own refuses to save.

The file system has to give exclusive creation and atomic rename within a folder, as POSIX and NFS do; no lock
and no clock. Claiming and renaming change the folder, after which an NFS client reads its names again. An
object store needs a conditional put (If-None-Match) for the claim, and lists that show every put that has
returned.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from gradsieve.errors import ConfigError

MANIFEST = "manifest.json"
_LAST_TERM = 10**15 - 1  # the names of a larger one match no pattern
_NAME = re.compile(
    r"term-(\d{1,15})"
    r"|manifest-(\d{1,15})\.(\d{1,15})\.(?:json|part)"
    r"|rank\d{5,7}-shard\d{5,7}-(\d{1,15})\.(\d{1,15})(?:-[0-9a-f]{16}\.safetensors|\.part)"
)


class FencingToken(NamedTuple):
    """Order checkpoints of one folder by term, then by number."""

    term: int
    # That of a claim sorts behind all checkpoints of its term, and is removed with the last.
    number: int = 10**15

    def __str__(self) -> str:
        return f"{self.term}.{self.number}"

    @property
    def manifest(self) -> str:
        return f"manifest-{self}.json"


def next_token(held: dict[str, tuple[int, int]], folder: Path) -> FencingToken:
    """Return the token of this run's next checkpoint there; `held` has that of its last one by folder."""
    place = os.path.realpath(folder)
    if place not in held or _latest_term(folder) == 0:  # the second: the folder was emptied
        held[place] = claim(folder), 0
    term, number = held[place]
    token = FencingToken(term, number + 1)
    refuse_superseded(folder, token)
    held[place] = token
    remove_older(folder, token, but=manifests(folder))  # saves that broke off may have filled the disk
    return token


def claim(folder: Path) -> int:
    """Create the file of a term that no other run has or had, and return the term."""
    while True:
        term = 1 + _latest_term(folder)
        if term > _LAST_TERM:
            raise ConfigError(
                f"{folder} has files of term {_LAST_TERM}, after which none can come: remove them"
            )
        with contextlib.suppress(FileExistsError):
            os.close(os.open(folder / f"term-{term}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            return term


def refuse_superseded(folder: Path, token: FencingToken) -> None:
    term = _latest_term(folder)
    if term > token.term:
        raise ConfigError(
            f"{folder} belongs to another run, which came later (term {term}, this one has {token.term}): "
            "end this one, or save to another folder"
        )


def manifests(folder: Path) -> list[FencingToken]:
    """Return the tokens of all checkpoints in the folder, the newest first."""
    found = {token for token, name in _tokens(folder) if name == token.manifest}
    return sorted(found, reverse=True)


def remove_older(folder: Path, token: FencingToken, but: Collection[FencingToken] = ()) -> None:
    """Remove all files with smaller tokens; the next save tries again what cannot be removed."""
    for old, name in list(_tokens(folder)):
        if old < token and old not in but:
            with contextlib.suppress(OSError):
                (folder / name).unlink()


def _tokens(folder: Path) -> Iterator[tuple[FencingToken, str]]:
    with contextlib.suppress(OSError):  # reading a manifest there says what is wrong
        for name in os.listdir(folder):
            if found := _NAME.fullmatch(name):
                yield FencingToken(*(int(part) for part in found.groups() if part)), name


def _latest_term(folder: Path) -> int:
    return max((token.term for token, _ in _tokens(folder)), default=0)
