"""The command `gradsieve`, and what the files of its sub-commands share."""

from gradsieve_tools import documents, quantities, results
from gradsieve_tools.cli.arguments import MOST_RANKS, describe, drawable, quantity, schemes, size
from gradsieve_tools.cli.progress_bar import progress

__all__ = [
    "MOST_RANKS",
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
