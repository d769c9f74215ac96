"""The rules of the race as code: links, entries and what a command is told. As a page: docs/race.md."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradsieve.errors import ConfigError
from gradsieve_tools.bench.common.race import PATIENCE

LINKS = ("1gbit", "100mbit", "100mbit+20ms")
WARM_UP, EVALUATE_EVERY, BATCH = 30, 20, 4
_RIVALS = ("fp16", "powersgd", "local-sgd", "diloco")
NAMES = ("dense", *_RIVALS, "auto")


def trainer() -> Path:
    """Return the trainer of the repository: an installed lab has no examples."""
    path = Path.cwd() / "examples" / "gpt" / "train.py"
    if not path.is_file():
        raise ConfigError(
            f"there is no {path}: start the race in a clone of the repository, whose GPT it trains"
        )
    return path


def entry(text: str) -> tuple[str, list[str]]:
    """A name of ours, or NAME=COMMAND; and the words that start it."""
    name, equals, command = text.partition("=")
    if equals:
        words = shlex.split(command)
        if not words or not name.replace("-", "").replace("_", "").isalnum():
            raise ConfigError(f"{text!r} is not NAME=COMMAND, the name of letters, digits, - and _")
        return name, words
    if name in ("dense", "auto"):
        return name, [sys.executable, str(trainer()), "--sync", name]
    if name not in _RIVALS:
        raise ConfigError(
            f"there is no entry {name!r}: choose from {', '.join(NAMES)}, or write NAME=COMMAND"
        )
    return name, [sys.executable, "-m", "gradsieve_tools.bench.race.rivals", name]


@dataclass(frozen=True, slots=True)
class Plan:
    text: Path
    size: str
    hosts: int
    steps: int  # dense's budget
    limit: float  # seconds of training for all other entries

    def __post_init__(self) -> None:
        if self.steps < 3 * EVALUATE_EVERY or self.steps % EVALUATE_EVERY:
            raise ConfigError(
                f"--steps is {self.steps}; it has to be a multiple of {EVALUATE_EVERY}, at which models are "
                f"evaluated, and {3 * EVALUATE_EVERY} or more"
            )
        self.tokens()

    def tokens(self) -> str:
        """The hash of the text."""
        try:
            facts: Mapping[str, Any] = json.loads((self.text / "text.json").read_text())
            return str(facts["tokens_sha256"])
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"{self.text} has no tokens ({error!r}); to make them: python "
                f"{trainer().with_name('prepare.py')} {self.text}"
            ) from error

    def most_steps(self, name: str) -> int:
        """Dense has its budget; any other entry some more, since it may need more steps."""
        return self.steps if name == "dense" else PATIENCE * self.steps

    def told(self, name: str, seed: int) -> list[str]:
        """Return the options that follow a command's own words."""
        given = {
            "text": self.text.resolve(),
            "size": self.size,
            "seed": seed,
            "steps": self.most_steps(name),
            "batch": BATCH,
            "warm-up": WARM_UP,
            "floor": 1,
            "evaluate-every": EVALUATE_EVERY,
        }
        return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def rate_and_delay(link: str) -> tuple[str, str | None]:
    rate, _, delay = link.partition("+")
    return rate, delay or None


def in_order(entries: Sequence[tuple[str, list[str]]]) -> dict[str, list[str]]:
    """Dense comes first: it sets the target."""
    wanted = dict(entries)
    if len(wanted) != len(entries):
        raise ConfigError("two entries have the same name")
    return dict([entry("dense")]) | wanted
