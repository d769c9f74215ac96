"""`gradsieve bench accuracy`: whether a model ends as good as it would dense.

Tasks x syncs x exchange settings x densities x seeds, each a whole training on virtual ranks; torch's own
hooks have real ones. Every training leaves one file in a folder, and one that is there already is not run
again: a study can be broken off and gone on with, or grow.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice, product
from multiprocessing import get_context
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any, TypeAlias

from gradsieve.errors import ConfigError, GradsieveError
from gradsieve_tools.bench.accuracy import rivals
from gradsieve_tools.bench.common import virtual
from gradsieve_tools.bench.common.machine import one_thread
from gradsieve_tools.bench.common.ranks import ended_with_us, lead_a_group
from gradsieve_tools.bench.rivals.base import RivalRun
from gradsieve_tools.bench.tasks import training as tasks
from gradsieve_tools.emulation import signals
from gradsieve_tools.records import path_of
from gradsieve_tools.results import versions
from gradsieve_tools.specs import parse, parse_exchange

_LOOK_SECONDS = 1.0  # between two looks at how far the trainings are


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    task: str
    sync: str
    treatment: str = "default"
    density: float = 1.0
    bits: float | None = None  # A budget a parameter and step, the flush included, instead of a density
    world: int = 4
    batch: int | None = None  # examples in a step, over all ranks, if not as many as the task has
    rate: float = 1.0  # times the task's learning rate
    mixed: bool = True
    seed: int = 0
    steps: int

    @property
    def file(self) -> str:
        density = repr(self.density).removesuffix(".0")  # all digits: no two densities share a name
        amount = f"d{density}" if self.bits is None else f"b{self.bits!r}"
        parts = [self.task, self.sync, self.treatment, amount, f"P{self.world}"]
        parts += [] if self.batch is None else [f"B{self.batch}"]
        parts += [] if self.rate == 1.0 else [f"r{self.rate!r}"]
        parts += [] if self.mixed else ["own"]
        return "_".join([*parts, f"n{self.steps}", f"s{self.seed}"]).replace(":", "~") + ".json"

    @property
    def stem(self) -> str:
        return self.file.removesuffix(".json")

    @property
    def is_recordable(self) -> bool:
        """torch's own hooks report nothing of their steps."""
        return not rivals.is_rival(self.sync)

    @property
    def work(self) -> int:
        return self.steps * self.world


Found: TypeAlias = Sequence[tuple[Case, dict[str, Any]]]


def cases(
    of_tasks: Sequence[str],
    syncs: Sequence[str],
    treatments: Sequence[str],
    densities: Sequence[float],
    budgets: Sequence[float],
    worlds: Sequence[int],
    seeds: int,
    mixed: bool,
    steps: int | None,
    batch: int | None = None,
    rates: Sequence[float] = (1.0,),
) -> list[Case]:
    """Return all combinations; dense and rivals have neither densities, budgets nor exchange settings."""
    found: dict[Case, None] = {}
    amounts: list[tuple[float, float | None]] = [(1.0, bits) for bits in budgets]
    amounts = amounts or [(density, None) for density in densities]
    for seed, task, world, rate, sync, treatment, (density, bits) in product(
        range(seeds), of_tasks, worlds, rates, syncs, treatments, amounts
    ):
        sync, at, own = sync.partition("@")
        treatment = own if at else treatment
        recipe = tasks.TASKS[task]
        if (examples := batch or recipe.batch) % world:
            raise ConfigError(
                f"{world} ranks cannot share the {examples} examples of a step of {task} evenly: choose a "
                "number that divides them, or --batch"
            )
        if sync == "dense" or rivals.is_rival(sync):
            treatment, density, bits = "default", 1.0, None
        elif bits is not None and sync != "stripes":
            raise ConfigError(f"a budget is spent by stripes: {sync} wants --densities")
        found[
            Case(
                task=task,
                sync=sync,
                treatment=treatment,
                density=density,
                bits=bits,
                world=world,
                batch=batch,
                rate=rate,
                mixed=mixed,
                seed=seed,
                steps=recipe.steps if steps is None else steps,
            )
        ] = None
    return list(found)


def at_own_rates(todo: Iterable[Case], found: Found) -> list[Case]:
    """Keep trainings at the rate that ended best with the first seed, and dense at the task's own."""
    by_rate: dict[Case, dict[float, float]] = {}
    for case, course in found:
        if case.seed == 0 and not math.isnan(final := course["values"][-1]):
            by_rate.setdefault(replace(case, rate=1.0), {})[case.rate] = final
    best = {
        kind: max(finals, key=lambda rate: tasks.BETTER[tasks.TASKS[kind.task].metric] * finals[rate])
        for kind, finals in by_rate.items()
    }
    return [
        case
        for case in todo
        if case.rate == best.get(replace(case, rate=1.0, seed=0))
        or (case.sync == "dense" and case.rate == 1.0)
    ]


def missing(todo: Iterable[Case], folder: Path, record: Path | None = None) -> list[Case]:
    """Return cases whose training or record is not there yet."""
    return [
        case
        for case in todo
        if not (folder / case.file).exists()
        or (record is not None and case.is_recordable and not path_of(record / case.stem, 0).exists())
    ]


def measure(
    todo: Iterable[Case],
    folder: Path,
    jobs: int,
    advance: Callable[[float, str], None],
    record: Path | None = None,
) -> None:
    """Run them, `jobs` at a time; `advance` is called with the work done, and with that of pending trainings.
    What every rank does in every step is recorded in the folder `record`, if there is one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"trainings cannot be kept there: {error}") from error
    run = partial(run_case, folder=folder, record=record)
    # Spawned: a process that already ran threads of torch cannot safely be forked.
    context = get_context("spawn")
    done = context.Value("q", 0)
    left, shown = iter(todo), 0
    with (
        tempfile.TemporaryDirectory(prefix="gradsieve-") as scratch,
        ProcessPoolExecutor(jobs, context, _Worker.start, (done, scratch)) as pool,
        ended_with_us(),
    ):
        # Never more than can run: a pool would still run its queue after an interruption.
        running = _submit(pool, islice(left, jobs), run)
        while running:
            ended, _ = wait(running, _LOOK_SECONDS, FIRST_COMPLETED)
            if (now := done.value) > shown:
                advance(now - shown, next(iter(running.values())).file)
                shown = now
            for future in [each for each in running if each in ended]:
                _expect_good(future, running.pop(future))
                running |= _submit(pool, islice(left, 1), run)


def _submit(
    pool: ProcessPoolExecutor, some: Iterable[Case], run: Callable[[Case], None]
) -> dict[Future[None], Case]:
    with signals.held_back():  # a process that is interrupted in its birth complains
        return {pool.submit(run, case): case for case in some}


def _expect_good(future: Future[None], case: Case) -> None:
    try:
        future.result()
    except GradsieveError as error:
        raise type(error)(f"{case.file}: {error}") from error
    except Exception as error:
        raise RuntimeError(f"in the training {case.file}: {type(error).__name__}: {error}") from error


class _Worker:
    done: Synchronized[int]  # work of all processes together

    @classmethod
    def start(cls, done: Synchronized[int], scratch: str) -> None:
        cls.done = done
        lead_a_group()  # it may have ranks of its own
        tempfile.tempdir = scratch  # ours to remove: a process that is killed leaves all as it is


def _add(done: Synchronized[int], work: int) -> None:
    with done.get_lock():
        done.value += work


def run_case(case: Case, folder: Path, record: Path | None = None) -> None:
    course = train(case, partial(_add, _Worker.done, case.world), record)
    training = {"case": asdict(case), "versions": versions(), "course": _plain(asdict(course))}
    part = folder / (case.file + ".part")
    part.write_text(json.dumps(training, allow_nan=False) + "\n")
    part.rename(folder / case.file)  # whole or not at all


def train(case: Case, after_step: Callable[[], None], record: Path | None = None) -> virtual.Course:
    if rivals.is_rival(case.sync):
        rival = rivals.parse(case.sync)
        return rivals.train(
            RivalRun(case.task, rival, case.seed, case.world, case.steps, case.mixed, case.batch, case.rate),
            after_step,
        )
    scheme = parse(case.sync, case.density)
    treatment = parse_exchange(case.treatment, scheme)
    run = virtual.Run(
        case.task,
        scheme,
        treatment,
        case.seed,
        case.world,
        case.steps,
        case.mixed,
        case.bits,
        case.batch,
        None if record is None else record / case.stem,
        case.rate,
    )
    with one_thread():
        return virtual.train(run, after_step)


def _plain(course: dict[str, Any]) -> dict[str, Any]:
    """Return what JSON can have: null for what is not finite, because the training diverged."""
    return {
        name: [each if math.isfinite(each) else None for each in value] if isinstance(value, list) else value
        for name, value in course.items()
    }


def read(folder: Path) -> Found:
    """Return all trainings of a folder."""
    return [_read(path) for path in sorted(folder.glob("*.json"))]


def _read(path: Path) -> tuple[Case, dict[str, Any]]:
    try:
        record = json.loads(path.read_text())
        case, course = Case(**record["case"]), asdict(virtual.Course(**record["course"]))
        for name in ("values", "fidelity", "waiting", "ages", "apart"):
            course[name] = [math.nan if each is None else float(each) for each in course[name]]
        known = case.file == path.name and case.task in tasks.TASKS and course["values"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} is no training that can be read ({error!r}): move it away") from error
    if not known:
        raise ConfigError(f"{path} does not hold the training that its name says: move it away")
    return case, course


def rows(found: Found, tried: Found | None = None) -> list[dict[str, Any]]:
    """Means over seeds, with their spread, next to dense with the same seeds. `tried` are the trainings among
    which these were chosen, if there were others."""
    groups: dict[Case, list[tuple[Case, dict[str, Any]]]] = {}
    for case, course in found:
        groups.setdefault(replace(case, seed=0), []).append((case, course))
    out = []
    for key, members in groups.items():
        final = {case.seed: course["values"][-1] for case, course in members}
        dense = _dense_like(key, found)
        gaps = [_gap(key.task, final[seed], dense[seed]) for seed in sorted(final.keys() & dense.keys())]
        out.append(
            {
                "task": key.task,
                "sync": key.sync,
                "treatment": key.treatment,
                "density": None if key.bits is not None else key.density,
                "budget": key.bits,
                "bits": _mean([_bits(course) for _, course in members], 3),
                "rate": key.rate,
                "world": key.world,
                "batch": key.batch or tasks.TASKS[key.task].batch,
                "shards": "mixed" if key.mixed else "own",
                "steps": key.steps,
                "seeds": len(final),
                "trials": _trials(key, found if tried is None else tried),
                "diverged": sum(not math.isfinite(value) for value in final.values()),
                "metric": tasks.TASKS[key.task].metric,
                "final": _mean(list(final.values()), 4),
                "spread": _spread(list(final.values()), 4),
                "unflushed": _mean([_or_nan(course["unflushed"]) for _, course in members], 4),
                "unflushed_bits": _mean([_bits(course, "unflushed_bytes") for _, course in members], 4),
                "gap": _mean(gaps, 3),
                "gap_spread": _spread(gaps, 3),
                "fidelity": _mean_of(members, "fidelity"),
                "age": _mean_of(members, "ages"),
                "waiting": _mean_of(members, "waiting"),
                "apart": _mean_of(members, "apart"),
                "sent": round(statistics.mean(course["density"] for _, course in members), 5),
                "bytes": round(statistics.mean(course["bytes_sent"] for _, course in members)),
            }
        )
    return out


COLUMNS = (
    "task", "sync", "treatment", "density", "budget", "bits", "rate", "world", "batch", "seeds", "trials",
    "final", "spread", "unflushed", "unflushed_bits", "gap", "gap_spread", "fidelity", "age", "waiting",
    "apart", "bytes",
)  # fmt: skip


def _bits(course: dict[str, Any], moved: str = "bytes_sent") -> float:
    """A parameter and step, moved by the busiest rank; NaN of a training from before they were counted."""
    return 8 * _or_nan(course[moved]) / course["parameters"] if course["parameters"] else math.nan


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _gap(task: str, value: float, dense: float) -> float:
    """Return how much worse than dense: points of accuracy, or per cent of the loss. Below 0: better."""
    if tasks.TASKS[task].metric == "accuracy":
        return 100 * (dense - value)
    return 100 * (value - dense) / dense


def _dense_like(key: Case, found: Found) -> dict[int, float]:
    """Dense's final value by seed, at the task's own rate, with the same number of ranks and steps."""
    return {
        case.seed: course["values"][-1]
        for case, course in found
        if case.sync == "dense" and case.rate == 1.0 and _is_like(case, key)
    }


def _trials(key: Case, tried: Found) -> int:
    """Trainings of the first seed with any settings and rate of the same sync."""
    name = key.sync.partition(":")[0]
    return sum(
        case.seed == 0 and case.sync.partition(":")[0] == name and _is_like(case, key) for case, _ in tried
    )


def _is_like(case: Case, key: Case) -> bool:
    same = ("task", "world", "batch", "mixed", "steps")
    return all(getattr(case, name) == getattr(key, name) for name in same)


def _mean(values: Sequence[float], digits: int) -> float | None:
    """Return None if one of them diverged: the mean of the others would flatter."""
    return round(statistics.mean(values), digits) if values and all(map(math.isfinite, values)) else None


def _spread(values: Sequence[float], digits: int) -> float | None:
    """Standard deviation over seeds."""
    finite = all(map(math.isfinite, values))
    return round(statistics.stdev(values), digits) if len(values) > 1 and finite else None


def _mean_of(members: Found, name: str) -> float | None:
    return _mean([value for _, course in members for value in course[name] if math.isfinite(value)], 3)
