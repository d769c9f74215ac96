"""Calls of `gradsieve bench` and `gradsieve figure`: from what was typed to tables and files."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradsieve.errors import ConfigError
from gradsieve_tools.bench import plots
from gradsieve_tools.cli import progress, results

if TYPE_CHECKING:
    from gradsieve_tools.bench.accuracy.measure import Case

MOST_ROWS = 32  # of a batch of `bench hsdp`, a rank
WITHIN = 0.02  # of the undisturbed loss, that of a training whose replicas were killed


def step(args: argparse.Namespace) -> int:
    from gradsieve_tools.bench.common.syncs import syncs_of
    from gradsieve_tools.bench.step import measure
    from gradsieve_tools.bench.step.timeline import chrome_trace
    from gradsieve_tools.bench.step.timeline_plot import plot

    _check_densities(args.density)
    syncs = syncs_of(args.syncs, always=measure.ALWAYS)
    plan = measure.Plan(
        args.hosts[0], args.rate, args.delay, args.workload, args.params, args.density, syncs, args.rounds,
        _folder(args.record), compute=args.compute, ahead=args.ahead, spins=args.spin,
    )  # fmt: skip
    if (args.ahead or args.spin) and args.workload != "idle":
        raise ConfigError("--ahead and --spin are of an emulated device: add --workload idle")
    _check_hosts(args.hosts, args.trace, args.timeline, args.record)
    if (args.trace or args.timeline or args.record) and not measure.ours(plan):
        raise ConfigError(
            "only syncs of ours have a timeline or a record: add one to --syncs, such as exdyna"
        )
    every = []
    for hosts in args.hosts:
        rows, steps = measure.measure(replace(plan, hosts=hosts))
        every += rows
        print(results.table(rows, [*measure.COLUMNS, *(["recorder_ms"] if args.record else [])]))
        if (doubt := measure.unclear(rows)) is not None:
            print(doubt)
    _write(args, asdict(plan) | results.hosts_of(args.hosts), every)
    if args.trace is not None:
        args.trace.write_text(json.dumps(chrome_trace(steps)))
    if args.timeline is not None:
        plot(steps, plan, args.timeline)
    return 0


def step_plot(args: argparse.Namespace) -> int:
    from gradsieve_tools.bench.step.plot import plot, read

    plot(read(args.files), args.plot)
    return 0


def overhead(args: argparse.Namespace) -> int:
    from gradsieve_tools.bench import overhead

    _check_densities(args.density)
    if args.world < 2:
        raise ConfigError("--world is 2 or more: a rank alone exchanges nothing")
    cases = overhead.cases(args.schemes, args.world, args.params, args.density)
    with progress(sum(map(overhead.work, cases))) as advance:
        rows = [row for case in cases for row in overhead.measure(case, advance)]
    print(results.table(rows, overhead.COLUMNS))
    stages = [name for name in overhead.STAGES if any(name in row["stage_ms"] for row in rows)]
    print("\n" + results.table(overhead.by_stage(rows), ["scheme", "exchange", "kernel", *stages]))
    return _write(args, _given(args, "schemes", "world", "params", "density"), rows)


def exchange(args: argparse.Namespace) -> int:
    from gradsieve_tools.bench.common.syncs import treated
    from gradsieve_tools.bench.common.workloads import check_size

    _check_densities(args.density)
    treated(args.scheme, args.density)  # refused here rather than by every host
    check_size("mlp", args.params)
    return _on_hosts(args, "exchange", _given(args, "scheme", "params", "density", "rounds"))


def collectives(args: argparse.Namespace) -> int:
    return _on_hosts(args, "collectives", {"sizes": args.bytes, "rounds": args.rounds})


def hsdp(args: argparse.Namespace) -> int:
    from gradsieve_tools.bench.common.workloads import check_size

    check_size("mlp", args.params)
    if args.hosts < 2:
        raise ConfigError("two hosts at least: there is nothing to exchange otherwise")
    if args.batch > MOST_ROWS:
        raise ConfigError(f"a batch has 1 to {MOST_ROWS} rows a rank, not {args.batch}")
    args.hosts = [args.hosts]
    return _on_hosts(args, "hsdp", _given(args, "per_host", "params", "batch", "rounds", "steps"))


def plan(args: argparse.Namespace) -> int:
    from gradsieve_tools.bench.common.syncs import SYNCS
    from gradsieve_tools.plan_validation import measure

    if (args.folder is None) == (args.against is None):
        raise ConfigError("give --folder for a lab, or --against for what others measured")
    if args.against is not None:
        return _against(args)
    syncs = args.syncs.split(",") if args.syncs else measure.SYNCS
    unknown = [sync for sync in syncs if sync not in SYNCS]
    if unknown:
        raise ConfigError(f"no sync is called {', '.join(unknown)}; there are: {', '.join(SYNCS)}")
    args.folder.mkdir(parents=True, exist_ok=True)
    cases = [
        measure.Case(place, args.params, args.density, syncs, args.rounds)
        for place in measure.places(args.cases)
    ]
    with progress(len(cases)) as advance:
        rows, failed = measure.run_all(cases, args.folder, lambda doing: advance(1, doing))
    if rows:
        found = measure.summary(rows)
        print(results.table(rows, measure.COLUMNS))
        print(results.table([found], list(found)))
        config = {"params": args.params, "density": args.density, "syncs": syncs, "failed": failed}
        _write(args, config | found, rows)
    for line in failed:
        print(f"gradsieve: {line}", file=sys.stderr)
    return 1 if failed else 0


def _against(args: argparse.Namespace) -> int:
    from gradsieve_tools.plan_validation import against

    cluster = against.Cluster.read(args.against)
    rows = against.compare(cluster)
    found = against.summary(rows)
    print(results.table(rows, against.COLUMNS))
    print(results.table([found], list(found)))
    return _write(args, {"source": cluster.source, **found}, rows)


def time_to_accuracy(args: argparse.Namespace) -> int:
    from gradsieve_tools.bench.common.syncs import syncs_of
    from gradsieve_tools.bench.time_to_accuracy import measure

    syncs = syncs_of(args.syncs, always=["dense"])
    plan = measure.Plan(
        args.hosts[0], args.rate, args.delay, args.task, args.params, args.density, syncs, args.steps,
        args.seeds, _folder(args.record),
    )  # fmt: skip
    _check_hosts(args.hosts, args.plot, args.record)
    every = []
    for hosts in args.hosts:
        runs = measure.measure(replace(plan, hosts=hosts))
        rows = [{"hosts": hosts, **row} for row in measure.summary(runs)]
        every += rows
        print(results.table(rows, measure.COLUMNS))
    _write(args, plan.facts() | results.hosts_of(args.hosts), every)
    if args.plot is not None:
        plots.races({plan.title: runs}, plan.sized.measured_by, args.plot)
    return 0


def race(args: argparse.Namespace) -> int:
    from gradsieve_tools.bench.race import logs, measure, rules

    if not args.table:
        if args.text is None:
            raise ConfigError("--text is missing: python examples/gpt/prepare.py text")
        plan = rules.Plan(args.text, args.size, args.hosts, args.steps, args.limit)
        entries = rules.in_order([rules.entry(text) for text in args.entries.split(",")])
        links = args.links.split(",")
        with progress(sum(map(plan.most_steps, entries)) * len(links) * args.seeds) as advance:
            measure.race(plan, entries, links, args.seeds, args.logs, advance)
    found = logs.read_all(args.logs)
    print(results.table(logs.table(found), logs.COLUMNS))
    if args.plot is not None:
        wanted = logs.targets(found)
        first = [log for log in found if log.seed == 0 and log.key in wanted]
        if not first:
            raise ConfigError("no log of seed 0 has its dense one beside it: there is nothing to draw")
        groups = {", ".join(log.group): [each for each in first if each.group == log.group] for log in first}
        runs = {title: [log.run(wanted) for log in own] for title, own in groups.items()}
        plots.races(runs, "loss on unseen files", args.plot)
    return 0


def traffic(args: argparse.Namespace) -> int:
    from gradsieve_tools.bench import traffic

    _check_densities(args.density)
    sizes = traffic.layers(args.model, args.params)
    cases = [
        traffic.Case(name, world, sum(sizes), args.density, sizes)
        for world in args.world
        for name in args.schemes
    ]
    with progress(sum(case.steps * case.work for case in cases)) as advance:
        rows = traffic.measure_all(cases, advance)
    print(results.table(rows, traffic.COLUMNS))
    config = _given(args, "schemes", "world", "model", "params", "density")
    _write(args, config | {"params": sum(sizes), "layers": len(sizes)}, rows)
    if args.plot is not None:
        traffic.plot(rows, sum(sizes), args.density, args.plot)
    return 0


def schemes(args: argparse.Namespace) -> int:
    from gradsieve_tools.bench.schemes import measure

    _check_densities(*args.densities)
    plan = measure.Plan(args.models, args.schemes, args.world, args.densities, args.steps)
    with progress(plan.work()) as advance:
        rows = measure.measure_all(plan, advance)
    print(measure.tables(rows))
    _write(args, asdict(plan), rows)
    if args.plot is not None:
        plots.schemes(rows, args.plot)
    return 0


def bits(args: argparse.Namespace) -> int:
    from gradsieve_tools.bench.bits import measure

    if len(args.world) > 1:
        raise ConfigError("--world is one number here: the residual depends on it")
    _check_densities(*args.densities)
    plan = measure.Plan(
        args.tasks, args.schemes, args.values, args.densities, args.world[0], args.steps, args.snapshots,
        args.every,
    )  # fmt: skip
    with progress(plan.work()) as advance:
        rows = measure.measure_all(plan, advance)
    print(results.table(rows, measure.COLUMNS))
    _write(args, asdict(plan), rows)
    if args.plot is not None:
        plots.bits(rows, lambda each: measure.bound(each, plan.world), args.plot)
    return 0


def memory(args: argparse.Namespace) -> int:
    from gradsieve_tools.bench import footprint

    _check_densities(args.density)
    rows = []
    cases = [(scheme, optimizer) for scheme in args.schemes for optimizer in footprint.OPTIMIZERS]
    with progress(len(cases)) as advance:
        for scheme, optimizer in cases:
            rows.append(footprint.measure(scheme, optimizer, args.world, args.params, args.density))
            advance(1, f"{scheme}, {optimizer}")
    print(results.table(rows, footprint.COLUMNS))
    return _write(args, _given(args, "schemes", "world", "params", "density"), rows)


def lost(args: argparse.Namespace) -> int:
    from gradsieve_tools.bench import lost
    from gradsieve_tools.bench.common.recordings import WARM_STEPS

    _check_densities(args.density)
    with progress(len(args.models) * (WARM_STEPS + args.steps * (1 + len(args.schemes)))) as advance:
        rows = lost.measure_all(args.models, args.schemes, args.world, args.density, args.steps, advance)
    print(results.table(rows, lost.COLUMNS))
    return _write(args, _given(args, "models", "schemes", "world", "density", "steps"), rows)


def accuracy(args: argparse.Namespace) -> int:
    from gradsieve_tools.bench.accuracy import measure
    from gradsieve_tools.specs import parse, parse_exchange

    _check_densities(*args.densities)
    if any(not bits > 0 for bits in args.bits):
        raise ConfigError("--bits are budgets above 0")
    if any(not rate > 0 for rate in args.rates):
        raise ConfigError("--rates are multiples above 0")
    syncs = args.syncs or ["dense", "stripes" if args.bits else "exdyna"]
    for exchange in [*args.treatments, *(own for _, at, own in (s.partition("@") for s in syncs) if at)]:
        parse_exchange(exchange, parse("exdyna"))
    if args.json is not None and args.json.resolve().parent == args.folder.resolve():
        raise ConfigError(f"{args.folder} is for trainings: write the rows to another folder")
    todo = measure.cases(
        args.tasks, syncs, args.treatments, args.densities, args.bits, args.world, args.seeds,
        not args.own_shards, args.steps, args.batch, args.rates,
    )  # fmt: skip
    measure.read(args.folder)  # what cannot be read is said now, and not after hours of training
    if args.own_rates:
        _train([case for case in todo if case.seed == 0], args)
        todo = measure.at_own_rates(todo, measure.read(args.folder))
    _train(todo, args)
    wanted = {case.file for case in todo}
    tried = measure.read(args.folder)
    found = [(case, course) for case, course in tried if case.file in wanted]
    rows = measure.rows(found, tried)
    print(results.table(rows, measure.COLUMNS))
    _write(args, {"folder": str(args.folder)}, rows)
    if args.plot is not None:
        plots.accuracy(found, args.plot)
    return 0


def _train(todo: Sequence[Case], args: argparse.Namespace) -> None:
    from gradsieve_tools.bench.accuracy import measure

    missing = measure.missing(todo, args.folder, args.record)
    with progress(sum(case.work for case in missing)) as advance:
        measure.measure(missing, args.folder, args.jobs, advance, args.record)


def resize(args: argparse.Namespace) -> int:
    from gradsieve_tools.bench import resize

    if (args.bits is None) == (args.density is None):
        raise ConfigError("give --bits or --density, and not both")
    amount = {"bits": args.bits} if args.density is None else {"density": args.density}
    with progress(len(args.ranks) * args.seeds * args.steps) as advance:
        rows = resize.measure_all(
            args.task, args.scheme, amount, args.ranks, args.seeds, args.steps, args.batch, advance
        )
    print(results.table(rows, resize.COLUMNS))
    names = ("task", "scheme", "bits", "density", "ranks", "seeds", "steps", "batch")
    return _write(args, _given(args, *names), rows)


def elastic(args: argparse.Namespace) -> int:
    if importlib.util.find_spec("torchft") is None:
        raise ConfigError("this needs torchft: pip install 'gradsieve[torchft]'")
    if args.replicas < 2:
        raise ConfigError(f"--replicas is {args.replicas}; there have to be 2 or more")
    if args.bits is not None and args.density is not None:
        raise ConfigError("give --bits or --density, and not both")
    from gradsieve_tools.bench.elastic import measure
    from gradsieve_tools.bench.elastic.replica import Plan
    from gradsieve_tools.bench.tasks.training import TASKS

    settings = {"scheme": args.scheme, "density": args.density}
    if args.density is None:
        settings = {"bits": args.bits or 1.0}
    least = max(1, args.replicas // 2)
    plan = Plan(args.task, args.replicas, args.steps, settings, args.seed, args.deadline, least)
    faults = measure.Faults(args.kill_every or 0, args.stop_every or 0, args.stop_seconds)
    with progress(2 * args.steps) as advance:
        rows = [
            measure.measure(plan, each, lambda steps: advance(steps, args.task))
            for each in (measure.Faults(), faults)
        ]
    print(results.table(rows, measure.COLUMNS))
    above = rows[1]["final"] / rows[0]["final"] - 1.0
    print(f"{100 * above:+.2f} % against the undisturbed training; lost mass {rows[1]['lost_mass']:.4g}:")
    for loss in rows[1]["losses"]:
        print(f"  replica {loss['name']}: {loss['waiting']:.4g}, as of exchange {loss['exchange']}")
    names = ("task", "replicas", "steps", "kill_every", "stop_every", "stop_seconds", "deadline", "seed")
    _write(args, _given(args, *names) | settings, [row | {"above": above} for row in rows])
    worse = above if TASKS[plan.task].metric == "loss" else -above
    return 0 if worse <= WITHIN and all(row["alike"] for row in rows) else 1


def figure(args: argparse.Namespace) -> int:
    from gradsieve_tools.bench.figures import catalogue

    if args.list:
        print(catalogue.listing())
        return 0
    if args.name is None:
        raise ConfigError("name a figure: gradsieve figure --list has them")
    figure = catalogue.named(args.name)
    if not args.files or args.out is None:
        raise ConfigError(f"gradsieve figure {args.name} FILE... --out FILE.png")
    figure.plot(args.files, args.out)
    return 0


# -- what they share --------------------------------------------------------------------------------------


def _check_densities(*densities: float) -> None:
    from gradsieve.schemes import check_density

    for density in densities:
        check_density(density)


def _check_hosts(hosts: Sequence[int], *files: Path | None) -> None:
    """Refuse before minutes of measuring what no lab or picture can have."""
    from gradsieve_tools.emulation.topology import MOST_HOSTS

    if max(hosts) > MOST_HOSTS:
        raise ConfigError(f"hosts is {max(hosts)}; a lab has 1 to {MOST_HOSTS}")
    if len(hosts) > 1 and any(files):
        raise ConfigError("a picture, trace or record is of one number of hosts: give one to --hosts")


def _on_hosts(args: argparse.Namespace, bench: str, config: dict[str, Any]) -> int:
    """Run `bench` on hosts of a lab: a table for each number of hosts, and the rows of all in one file."""
    from gradsieve_tools.bench.common.in_lab import rows_from_hosts

    _check_hosts(args.hosts)
    worker = f"gradsieve_tools.bench.{bench}"
    config = _given(args, "rate", "delay") | config
    every: list[results.Row] = []
    for hosts in args.hosts:
        rows = [{"hosts": hosts, **row} for row in rows_from_hosts(worker, {"hosts": hosts, **config})]
        every += rows
        print(results.table(rows, importlib.import_module(worker).COLUMNS))
    return _write(args, config | results.hosts_of(args.hosts), every)


def _write(args: argparse.Namespace, config: dict[str, Any], rows: Sequence[results.Row]) -> int:
    if args.json is not None:
        results.write(args.json, config, rows)
    return 0


def _given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names}


def _folder(path: Path | None) -> str | None:
    return None if path is None else str(path.resolve())
