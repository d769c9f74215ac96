"""What values of options look like: lists of schemes, tasks, ranks and numbers, with commas between them."""

from __future__ import annotations

import argparse
from collections.abc import Collection

from gradsieve.errors import ConfigError
from gradsieve_tools.cli import MOST_RANKS, schemes, size


def words(text: str) -> list[str]:
    return text.split(",")


def sizes(text: str) -> list[int]:
    return sorted({size(part) for part in text.split(",")})


def ways(text: str) -> list[list[int]]:
    """Parse numbers of ranks such as `4,4-2-4`."""
    return [[size(part) for part in way.split("-")] for way in text.split(",")]


def worlds(text: str) -> list[int]:
    found = sizes(text)
    if not all(2 <= number <= MOST_RANKS for number in found):
        raise argparse.ArgumentTypeError(f"{text!r}: there are 2 to {MOST_RANKS:,} ranks")
    return found


def world(text: str) -> int:
    (found,) = worlds(str(size(text)))
    return found


def some(text: str) -> tuple[int, float]:
    count, colon, factor = text.partition(":")
    try:
        found = int(count), float(factor)
    except ValueError:
        found = -1, 0.0
    if not colon or found[0] < 0 or not 1 <= found[1] <= 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not COUNT:FACTOR, a factor of 1 or more, such as 2:10")
    return found


def numbers(text: str) -> list[float]:
    try:
        return list(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} are not numbers with commas between them") from None


def models(text: str) -> list[str]:
    from gradsieve_tools.bench.common.models import MODELS

    return _known("no model is called", text.split(","), MODELS)


def tasks(text: str) -> list[str]:
    from gradsieve_tools.bench.tasks.training import TASKS

    tuned_on = [name for name, recipe in TASKS.items() if not recipe.held_out]
    return tuned_on if text == "all" else _known("no task is called", text.split(","), TASKS)


def codecs(text: str) -> list[str]:
    """Return how values travel."""
    from gradsieve.schemes import VALUE_CODECS

    names = VALUE_CODECS if text == "all" else text.split(",")
    return _known("values do not travel as", names, VALUE_CODECS)


def lossy(text: str) -> list[str]:
    from gradsieve.schemes import SCHEMES

    if text == "all":
        return [name for name, kind in SCHEMES.items() if not kind.no_comm and not kind.lossless]
    return schemes(text)


def talking(text: str) -> list[str]:
    """Parse as `schemes`, in the registry's order; `all` leaves out what exchanges nothing."""
    from gradsieve.schemes import SCHEMES

    if text == "all":
        return [name for name, kind in SCHEMES.items() if not kind.no_comm]
    return sorted(schemes(text), key=lambda each: list(SCHEMES).index(each.partition(":")[0]))


def schemes_and_rivals(text: str) -> list[str]:
    """Schemes and rivals: `dense,exdyna,powersgd:rank=4,diloco`."""
    from gradsieve_tools.bench.accuracy import rivals

    found: list[str] = []
    for each in text.split(","):
        if not rivals.is_rival(each):
            name, at, exchange = each.partition("@")
            found += [name + at + exchange for name in schemes(name)]
            continue
        try:
            rivals.parse(each)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        found.append(each)
    return list(dict.fromkeys(found))


def _known(refusal: str, names: Collection[str], known: Collection[str]) -> list[str]:
    """The names, each once."""
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(
            f"{refusal} {', '.join(map(repr, unknown))}; there are: {', '.join(known)}"
        )
    return list(dict.fromkeys(names))
