"""Which optimizers are served, in which ways of training: a table, measured on two real ranks.

    python scripts/compat.py                      all of it
    python scripts/compat.py --optimizers adamw,lion --cells plain,ema
    python scripts/compat.py --markdown docs/compatibility.md --json compat.json
    python scripts/compat.py --sync dense         nothing is attached: all is served, at 1.00
    python scripts/compat.py --sync alone         nothing is exchanged: all is wrong

A cell trains with what was attached (`compat_cells.py` says how) and is compared with plain DDP under the
same optimizer (`compat_optimizers.py`). It is

    served     the loss on unseen data is at most 1.15 times that of plain DDP, parameters and averages are
               the same bits on all ranks after every step, nobody sees a setting of the optimizer
               changed, and a resumed training ends in the bits of an undisturbed one
    refused    all ranks raised gradsieve's own error, with the reason
    no dense   plain DDP cannot do it either, or does it wrong
    WRONG      anything else; then the exit code is 1
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import re
import shlex
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from itertools import count, product
from pathlib import Path

import torch
from compat_cells import CELLS, STEPS, SYNCS, Attach, Dense, Seen, run_cell
from compat_optimizers import ROWS, Row

import gradsieve

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from multiproc.harness import Answer, RankFailure, Ranks

WORLD = 2
ENOUGH = 1.15
"""Loss of what is served, in losses of plain DDP."""
LEARNT = 0.7
"""Loss of plain DDP at the end, in losses at the start: above that, a task tells nothing."""
LIMIT, PATIENCE = 120.0, 20.0
"""Seconds for a cell, and for a rank to wait for another."""
REFERENCE = {"plain": "ema", "compile": "ema", "resume": "ema"}
"""Cells whose training plain DDP does just as in another one: that is run once."""


@dataclass(frozen=True)
class Fault:
    """What is wrong, in words that several cells can share, and the figures of this one."""

    what: str
    figures: str = ""

    def __str__(self) -> str:
        return f"{self.what} ({self.figures})" if self.figures else self.what


@dataclass
class Result:
    """Of one cell."""

    row: str
    cell: str
    kind: str
    """served, refused, no dense, WRONG or not installed."""
    reasons: list[Fault] = field(default_factory=list)
    ratio: float | None = None
    losses: dict[str, float] = field(default_factory=dict)
    dense_losses: dict[str, float] = field(default_factory=dict)
    graphs: int | None = None
    """Of `compile`."""
    said: list[str] = field(default_factory=list)
    """gradsieve's warnings on rank 0."""
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Of rank 0, without those of plain DDP: on an idle machine a cell takes hardly longer."""

    def __str__(self) -> str:
        ratio = "" if self.ratio is None else f" {self.ratio:.2f}"
        return f"{self.kind}{ratio}{': ' if self.reasons else ''}{'; '.join(map(str, self.reasons))}"


@dataclass(frozen=True)
class Broken:
    """A training that did not come to its end."""

    sentence: str
    refused: bool = False


class Table:
    """Runs cells on ranks that live on from cell to cell, and are started anew after a failure."""

    def __init__(self, ranks: Ranks, attach: Attach, steps: int = STEPS, limit: float = LIMIT) -> None:
        self.ranks, self.attach, self.steps, self.limit = ranks, attach, steps, limit
        self._references: dict[tuple[str, str], list[Seen] | Broken] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="gradsieve-compat-")
        self._number = count()

    def result(self, row: Row, cell: str) -> Result:
        start = time.monotonic()
        out = self._result(row, cell)
        out.seconds = round(time.monotonic() - start, 1)
        return out

    def _result(self, row: Row, cell: str) -> Result:
        if not row.is_installed:
            return Result(row.name, cell, "not installed")
        dense = self._reference(row, REFERENCE.get(cell, cell))
        if isinstance(dense, Broken):
            return Result(row.name, cell, "no dense", [Fault(dense.sentence)])
        seen = self._train(row, cell, self.attach)
        if isinstance(seen, Broken):
            out = Result(row.name, cell, "refused" if seen.refused else "WRONG", [Fault(seen.sentence)])
        else:
            out = evaluated(row, cell, seen, dense)
        if out.kind == "WRONG" and cell in ("compile", "resume"):  # in the others, `dense` did the same
            again = self._reference(row, cell)
            own = [Fault(again.sentence)] if isinstance(again, Broken) else [*faults(again, dense, cell)]
            if own:
                return Result(row.name, cell, "no dense", own)
        return out

    def _reference(self, row: Row, cell: str) -> list[Seen] | Broken:
        if (row.name, cell) not in self._references:
            self._references[row.name, cell] = self._train(row, cell, Dense)
        return self._references[row.name, cell]

    def _train(self, row: Row, cell: str, attach: Attach) -> list[Seen] | Broken:
        folder = f"{self._folder.name}/{next(self._number)}"
        try:
            answers = self.ranks.outcomes(
                run_cell,
                row.name,
                cell,
                attach,
                folder,
                steps=self.steps,
                timeout=self.limit,
                group_timeout=PATIENCE,
            )
        except RankFailure as hang:
            return Broken(f"no end after {self.limit:g} s: {_where_it_hangs(str(hang))}")
        if all(answer.is_good for answer in answers):
            return [answer.value for answer in answers]
        self.ranks.kill()  # threads of what failed may be there still
        return broken(answers)


# -- judging -----------------------------------------------------------------------------------------------


def evaluated(row: Row, cell: str, seen: Sequence[Seen], dense: Sequence[Seen]) -> Result:
    """A training that came to its end."""
    wrong, ratio = [*faults(seen, dense, cell)], ratio_of(seen, dense)
    out = Result(row.name, cell, "WRONG" if wrong else "served", wrong)
    out.ratio = ratio if math.isfinite(ratio) else None
    out.losses, out.dense_losses, out.said = seen[0].losses, dense[0].losses, seen[0].said
    out.cpu_seconds = round(seen[0].cpu_seconds, 2)
    out.graphs = seen[0].graphs if cell == "compile" else None
    return out


def ratio_of(seen: Sequence[Seen], dense: Sequence[Seen]) -> float:
    """The worst, over what was evaluated and over ranks."""
    every = [loss / dense[0].losses[what] for one in seen for what, loss in one.losses.items()]
    return math.nan if any(math.isnan(each) for each in every) else max(every)


def faults(seen: Sequence[Seen], dense: Sequence[Seen], cell: str) -> Iterator[Fault]:
    start, end = dense[0].at_start, dense[0].losses["model"]
    if not end <= LEARNT * start:
        yield Fault("plain DDP learns nothing", f"{start:.3f} became {end:.3f}")
    for what in seen[0].digests:
        times = list(zip(*(one.digests[what] for one in seen), strict=True))
        if unlike := [time for time, digests in enumerate(times) if len({*digests}) > 1]:
            yield Fault(
                f"ranks differ in {what}", f"{len(unlike)} times of {len(times)}, first at {unlike[0]}"
            )
    if changed := next((one.changed_setting for one in seen if one.changed_setting), None):
        yield Fault(*changed)
    if any(one.went_on_alike is False for one in seen):
        yield Fault("the resumed training ends in other bits than the undisturbed one")
    if cell == "scaler" and max(one.skipped for one in seen) < 3:
        yield Fault("the GradScaler skipped too few steps", f"by rank: {[one.skipped for one in seen]}")
    ratio = ratio_of(seen, dense)
    if not ratio <= ENOUGH:
        yield Fault(f"the loss is more than {ENOUGH} times that of plain DDP", f"{ratio:.2f}")


_END = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*)(?:: (?P<sentence>.*))?$")


def broken(answers: Sequence[Answer]) -> Broken:
    """What ranks said, in one sentence: of one that knows the reason, not of those that missed it."""
    errors = [_error(answer) for answer in answers]
    ours = [kind.startswith("gradsieve.errors.") for kind, _ in errors]
    for kind, sentence in errors:
        if kind == "gradsieve.errors.ConfigError" and all(ours):
            return Broken(sentence, refused=True)
    failed = [rank for rank, (kind, _) in enumerate(errors) if kind != "fine"]
    rank = min(failed, key=lambda each: _is_late(*errors[each]))
    kind, sentence = errors[rank]
    where = "" if len({*errors}) == 1 else f"rank {rank}: "
    return Broken(f"{where}{kind.rsplit('.', 1)[-1]}: {sentence}")


def _is_late(kind: str, sentence: str) -> bool:
    """Whether it tells of another rank's end."""
    return kind.endswith(("PeerError", "DistBackendError")) or "gloo" in sentence


def _error(answer: Answer) -> tuple[str, str]:
    """Its class and first line."""
    if answer.is_good:
        return "fine", ""
    if answer.error is None:
        return "died", f"exit code {answer.exit_code}"
    last = answer.error.rsplit("Traceback (most recent call last):", 1)[-1].splitlines()
    found = next((match for line in last if (match := _END.match(line))), None)
    if found is None:
        return "unknown", " ".join(answer.error.split())[-200:]
    sentence = found["sentence"] or ""
    return found["kind"], sentence if len(sentence) < 300 else f"{sentence[:297]}..."


def _where_it_hangs(text: str) -> str:
    """What each rank did: how it ended, or the innermost function of ours that it is in."""
    out = []
    for rank, how, rest in re.findall(
        r"^rank (\d) (raised|hangs at)\n((?:(?!rank \d ).*\n?)*)", text, re.MULTILINE
    ):
        if how == "raised":
            out.append(f"rank {rank} raised {': '.join(_error(Answer(error=rest)))}")
        else:
            main = rest.rsplit("Thread 0x", 1)[-1]  # faulthandler's last is the main thread
            ours = re.findall(r'File "[^"]*/(?:src|tests)/[^"]+", line \d+ in (\w+)', main)
            out.append(f"rank {rank} waits in {ours[0]}" if ours else f"rank {rank} waits")
    return "; ".join(out)


# -- telling -----------------------------------------------------------------------------------------------


def table(results: Sequence[Result], cells: Sequence[str]) -> str:
    """In Markdown, rows as in `ROWS`."""
    lines = [f"| | {' | '.join(cells)} |", f"|---|{'---|' * len(cells)}"]
    for name in dict.fromkeys(result.row for result in results):
        texts = {result.cell: _short(result) for result in results if result.row == name}
        lines.append(f"| {ROWS[name].title} | {' | '.join(texts[cell] for cell in cells)} |")
    return "\n".join(lines)


def _short(result: Result) -> str:
    if result.kind == "served":
        return f"{result.ratio:.2f}"
    return "**WRONG**" if result.kind == "WRONG" else result.kind


def reasons(results: Sequence[Result], kind: str) -> list[str]:
    """A line for every reason, with the cells that it is about and the figures of the first."""
    where: dict[str, dict[str, list[str]]] = {}
    figures: dict[str, str] = {}
    for result in results:
        for fault in result.reasons if result.kind == kind else ():
            where.setdefault(fault.what, {}).setdefault(result.cell, []).append(result.row)
            figures.setdefault(fault.what, f" (of the first: {fault.figures})" if fault.figures else "")
    out = []
    for what, cells in where.items():
        named: dict[str, list[str]] = {}  # cells, by the rows that they have in common
        for cell, rows in cells.items():
            named.setdefault(", ".join(rows), []).append(cell)
        out.append(f"- {what}{figures[what]}")
        out += [f"    - {', '.join(cells)}: {rows}" for rows, cells in named.items()]
    return out


COLUMNS = {
    "plain": "forward, backward, step; as in all others, a `MultiStepLR` lowers the rate twice",
    "scaler": "a `GradScaler`, and four steps in which the loss of one rank overflows, the first among them",
    "two-models": "encoder and decoder in a `DistributedDataParallel` each, one optimizer over both",
    "ema": "`AveragedModel`, one updated after the step and one in a hook of it; the number is the worst",
    "compile": '`torch.compile(backend="eager")` around `optimizer.step()`',
    "accumulate": "two micro-batches a step, the first of them under `no_sync()`",
    "resume": "saved half-way with `sync.save()`; a fresh model and sync end in the bits of the other run",
}


def _filled(text: str, width: int = 110) -> str:
    """Lines of a page. What belongs to an item of a list is indented as it is."""
    start = len(text) - len(text.lstrip(" -"))
    return textwrap.fill(
        text, width, subsequent_indent=" " * start, break_long_words=False, break_on_hyphens=False
    )


def page(results: Sequence[Result], cells: Sequence[str], command: str, seconds: float, steps: int) -> str:
    """For docs/compatibility.md."""
    kinds = ("served", "refused", "no dense", "not installed", "WRONG")
    counts = {kind: sum(result.kind == kind for result in results) for kind in kinds}
    parts = [
        "# Which optimizers are served",
        _filled(
            "A number says that the cell is served. It is the loss on unseen data over plain DDP's with "
            "the same optimizer. Parameters and averages are the same bits on both ranks after every step. "
            "Nobody sees a setting of the optimizer changed, neither after the step nor in a hook of it."
        ),
        _filled("*refused*: all ranks say why. *no dense*: plain DDP cannot do it either."),
        table(results, cells),
        "## The columns",
        "\n".join(f"- **{cell}**: {COLUMNS[cell]}" for cell in cells),
    ]
    for kind, heading in (
        ("refused", "Refused"),
        ("no dense", "Not with plain DDP either"),
        ("WRONG", "Wrong"),
    ):
        if lines := reasons(results, kind):
            parts += [f"## {heading}", "\n".join(_filled(line) for line in lines)]
    made = (
        f"Written by `{command}` on {date.today()}, in {seconds / 60:.0f} minutes: "
        f"{', '.join(f'{name} {version}' for name, version in versions().items())}. Two ranks with gloo on a "
        f"CPU, {steps} steps of a small regression in which each rank has inputs of its own, "
        "`attach(ddp, optimizer, bits=2.0)`. "
        f"Cells: {', '.join(f'{number} {kind}' for kind, number in counts.items() if number)}."
    )
    parts += ['??? note "Reproduce"', textwrap.indent(_filled(made, 106), "    ")]
    return "\n\n".join(parts) + "\n"


@dataclass
class Record:
    """What was measured, in a file that is whole after every cell: on a busy machine a table takes long."""

    command: str
    steps: int
    path: Path | None
    results: list[Result] = field(default_factory=list)
    known: dict[tuple[str, str], Result] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=lambda: versions())

    def take(self, path: Path) -> None:
        stored = json.loads(path.read_text())
        if (stored["steps"], stored["versions"]) != (self.steps, self.versions):
            sys.exit(
                f"{path} is of {stored['steps']} steps and {stored['versions']}: it cannot be gone on with"
            )
        for cell in stored["cells"]:
            cell["reasons"] = [Fault(**reason) for reason in cell["reasons"]]
            self.known[cell["row"], cell["cell"]] = Result(**cell)

    def add(self, result: Result) -> None:
        if versions() != self.versions:
            sys.exit(f"the source was changed while it was measured: {self.versions}, now {versions()}")
        self.results.append(result)
        if self.path is not None:
            cells = [asdict(each) for each in self.results]
            whole = {"command": self.command, "versions": self.versions, "steps": self.steps, "cells": cells}
            self.path.write_text(json.dumps(whole, indent=1) + "\n")


def versions() -> dict[str, str]:
    """Also of the source that is measured, committed or not: cells of two of them are not one table."""
    source = hashlib.sha256()
    for path in sorted(Path(gradsieve.__file__).parent.rglob("*.py")):
        source.update(path.read_bytes())
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gradsieve": f"{gradsieve.__version__}, source {source.hexdigest()[:12]}",
    }


def chosen(text: str | None, known: Iterable[str], what: str) -> list[str]:
    names = list(known)
    picked = names if text is None else text.split(",")
    if unknown := [name for name in picked if name not in names]:
        sys.exit(f"no such {what}: {', '.join(unknown)}. There are {', '.join(names)}")
    return picked


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--optimizers", help=f"some of {','.join(ROWS)}")
    parser.add_argument("--cells", help=f"some of {','.join(CELLS)}")
    parser.add_argument("--sync", choices=SYNCS, default="gradsieve")
    parser.add_argument("--json", type=Path, help="write all that was measured")
    parser.add_argument("--take", type=Path, help="a --json of before: cells in it are not run again")
    parser.add_argument("--markdown", type=Path, help="write the page for the documentation")
    parser.add_argument("--steps", type=int, default=STEPS, help="of a training")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for a cell")
    options = parser.parse_args(arguments)
    rows = [ROWS[name] for name in chosen(options.optimizers, ROWS, "optimizer")]
    cells = chosen(options.cells, CELLS, "cell")
    words = [os.path.relpath(sys.argv[0]), *(sys.argv[1:] if arguments is None else arguments)]
    record = Record(f"python {shlex.join(words)}", options.steps, options.json)
    if options.take:
        record.take(options.take)
    with Ranks(WORLD) as ranks:
        runs = Table(ranks, SYNCS[options.sync], options.steps, options.limit)
        for number, (row, cell) in enumerate(product(rows, cells), start=1):
            result = record.known.get((row.name, cell)) or runs.result(row, cell)
            record.add(result)
            head = f"{number:>4}/{len(rows) * len(cells)} {row.name:<19}{cell:<11}{result.seconds:5.1f} s"
            print(f"{head}  {result}", file=sys.stderr, flush=True)
    results, seconds = record.results, sum(result.seconds for result in record.results)
    if options.markdown:
        options.markdown.write_text(page(results, cells, record.command, seconds, options.steps))
    print(table(results, cells))
    for kind in ("refused", "no dense", "WRONG"):
        if lines := reasons(results, kind):
            print("\n".join(["", f"{kind}:", *lines]))
    print(f"{seconds:.0f} s", file=sys.stderr)
    return int(any(result.kind == "WRONG" for result in results))


if __name__ == "__main__":
    sys.exit(main())
