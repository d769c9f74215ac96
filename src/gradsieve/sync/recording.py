"""`gradsieve.record`: what every step of a sync did, in a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gradsieve.observe.recorder import EVERY, Recorder
from gradsieve.observe.sinks import Sink
from gradsieve.sync.gradient_sync import GradientSync


def record(
    sync: GradientSync, path: str | Path, *, every: int = EVERY, sinks: Sequence[Sink] = ()
) -> Recorder:
    """Write one line of JSON a step to `path`.rank0.jsonl, and so on for each rank (of shards, to
    `path`.shard0.rank0.jsonl); norms every `every` steps. The lines go to `sinks` too. Call it on the ranks
    that are to be recorded; docs/recording.md describes the fields and the sinks."""
    sync.complete()
    stem, replica = Path(path), sync.replica
    return Recorder(replica.pipeline, stem.with_name(stem.name + replica.part), every, sinks)
