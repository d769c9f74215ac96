"""The command `gradsieve`, and what a package needs that adds commands to it (`tree.GROUP`)."""

from gradsieve.tools import documents, quantities, results
from gradsieve.tools.cli.arguments import MOST_RANKS, describe, drawable, quantity, schemes, size
from gradsieve.tools.cli.progress_bar import progress
from gradsieve.tools.cli.tree import Command

__all__ = [
    "MOST_RANKS",
    "Command",
    "describe",
    "documents",
    "drawable",
    "progress",
    "quantities",
    "quantity",
    "results",
    "schemes",
    "size",
]
