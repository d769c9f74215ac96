"""What the lab's commands share: which hosts, ranks, schemes and tasks, and how they are written."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from gradsieve.errors import ConfigError
from gradsieve.tools.cli import MOST_RANKS, size


def add_lab(parser: argparse.ArgumentParser) -> None:
    """The hosts and links of a bench on a lab network."""
    add = parser.add_argument
    add(
        "--hosts",
        type=sizes,
        default="4",
        metavar="LIST",
        help="numbers of hosts in the lab, a table each (default: 4)",
    )
    add("--rate", metavar="R", help="of each link, e.g. 1gbit (default: unshaped)")
    add("--delay", metavar="D", help="one way, e.g. 5ms (default: none)")


def check_hosts(hosts: Sequence[int], *files: Path | None) -> None:
    """Before minutes of measuring: no lab has so many, or a picture or record is of one number of hosts."""
    from gradsieve_lab.emulation.topology import MOST_HOSTS

    if max(hosts) > MOST_HOSTS:
        raise ConfigError(f"hosts is {max(hosts)}; a lab has 1 to {MOST_HOSTS}")
    if len(hosts) > 1 and any(files):
        raise ConfigError("a picture, trace or record is of one number of hosts: give one to --hosts")


def add_syncs(parser: argparse.ArgumentParser, default: str) -> None:
    """What a bench on a lab network compares."""
    from gradsieve_lab.bench.common.syncs import SYNCS

    parser.add_argument(
        "--syncs",
        default=default,
        metavar="LIST",
        help=f"from {', '.join(SYNCS)}; settings of a scheme follow a colon, with + between them; "
        "exchange settings follow an @: spardl:teams=2, exdyna@paper, exdyna@steps:overlap=0 "
        "(default: %(default)s)",
    )


def add_models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--models",
        type=models,
        default="cnn,transformer,recommender",
        metavar="LIST",
        help="what is trained (default: %(default)s)",
    )


def add_record(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FOLDER",
        help="write what every rank did in every step there, for `gradsieve figure`",
    )


def sizes(text: str) -> list[int]:
    """In order, each once."""
    return sorted({size(part) for part in text.split(",")})


def worlds(text: str) -> list[int]:
    numbers = [size(part) for part in text.split(",")]
    if not all(2 <= number <= MOST_RANKS for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r}: there are 2 to {MOST_RANKS:,} ranks")
    return sorted(set(numbers))


def densities(text: str) -> list[float]:
    try:
        return list(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} are not numbers with commas between them") from None


def models(text: str) -> list[str]:
    from gradsieve_lab.bench.common.models import MODELS

    names = list(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no model is called {', '.join(map(repr, unknown))}; there are: {', '.join(MODELS)}"
        )
    return names


def tasks(text: str) -> list[str]:
    from gradsieve_lab.bench.tasks.training import TASKS

    tuned_on = [name for name, recipe in TASKS.items() if not recipe.held_out]
    names = tuned_on if text == "all" else list(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in TASKS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no task is called {', '.join(map(repr, unknown))}; there are: {', '.join(TASKS)}"
        )
    return names
