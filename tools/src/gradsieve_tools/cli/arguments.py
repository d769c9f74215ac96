"""What sub-commands share: how they are described, what the values of their options look like."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path

from gradsieve.errors import ConfigError
from gradsieve_tools.quantities import SECONDS, Units, parse, whole_number

MOST = 10**12
MOST_RANKS = 65_536


def describe(
    parser: argparse.ArgumentParser,
    call: Callable[[argparse.Namespace], int],
    description: str,
    example: str,
) -> None:
    parser.description, parser.epilog = description, example
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(call=call)


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


def schemes(text: str) -> list[str]:
    """Names of schemes, with settings or without: `topk,gtopk:paper=true`."""
    from gradsieve.schemes import SCHEMES
    from gradsieve_tools.specs import parse

    texts = list(SCHEMES) if text == "all" else list(dict.fromkeys(text.split(",")))
    try:
        for each in texts:
            parse(each)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return texts


def drawable(path: Path | None) -> None:
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("drawing needs matplotlib: pip install 'gradsieve-tools[plot]'")
