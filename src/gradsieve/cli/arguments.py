"""What sub-commands share: how they are described, what the values of their options look like."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

from gradsieve.errors import ConfigError
from gradsieve.quantities import SECONDS, Units, parse, whole_number

MOST = 10**12
MOST_RANKS = 65_536


def describe(
    parser: argparse.ArgumentParser,
    call: Callable[[argparse.Namespace], int],
    description: str,
    example: str,
) -> None:
    """What a sub-command does, and what says so: texts are shown as they are written."""
    parser.description, parser.epilog = description, example
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(call=call)


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
    from gradsieve.lab.topology import MOST_HOSTS

    if max(hosts) > MOST_HOSTS:
        raise ConfigError(f"hosts is {max(hosts)}; a lab has 1 to {MOST_HOSTS}")
    if len(hosts) > 1 and any(files):
        raise ConfigError("a picture, trace or record is of one number of hosts: give one to --hosts")


def add_syncs(parser: argparse.ArgumentParser, default: str) -> None:
    """What a bench on a lab network compares."""
    from gradsieve.bench.common.syncs import SYNCS

    parser.add_argument(
        "--syncs",
        default=default,
        metavar="LIST",
        help=f"from {', '.join(SYNCS)}; settings of a scheme follow a colon, with + between them; a "
        "treatment follows an @: spardl:teams=2, exdyna@paper, exdyna@steps:late=false "
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


def quantity(units: Units, example: str) -> Callable[[str], float]:
    """A number with one of these units; only a time can be 0."""

    def read(text: str) -> float:
        value = parse(text, units)
        if value is None or (value <= 0 and units is not SECONDS):
            raise argparse.ArgumentTypeError(f"{text!r} is not such as {example}, without a space")
        return value

    return read


def size(text: str) -> int:
    """A whole number as people write it: 1000, 25e6, 124M, 1.3B; exactly, never by way of a float."""
    number = whole_number(text)
    if number is None or not 1 <= number <= MOST:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number from 1 up to {MOST:.0e}, such as 1000, 25e6, 124M or 1.3B"
        )
    return number


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


def schemes(text: str) -> list[str]:
    """Names of schemes, with settings or without: `topk,gtopk:paper=true`."""
    from gradsieve.schemes import SCHEMES
    from gradsieve.schemes.spec import parse

    texts = list(SCHEMES) if text == "all" else list(dict.fromkeys(text.split(",")))
    try:
        for each in texts:
            parse(each)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return texts


def models(text: str) -> list[str]:
    from gradsieve.bench.common.models import MODELS

    names = list(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no model is called {', '.join(map(repr, unknown))}; there are: {', '.join(MODELS)}"
        )
    return names


def tasks(text: str) -> list[str]:
    from gradsieve.bench.tasks.training import TASKS

    names = list(TASKS) if text == "all" else list(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in TASKS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no task is called {', '.join(map(repr, unknown))}; there are: {', '.join(TASKS)}"
        )
    return names


def drawable(path: Path | None) -> None:
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("drawing needs matplotlib: pip install 'gradsieve[plot]'")
