"""How hard pages are to read: python scripts/reading.py [--most GRADE] PAGE...

For each page its words, the Flesch-Kincaid grade of its prose, its longest sentence in words, and how many of
its lines have more than 110 characters. Code, tables, links' addresses, headings and comments are left out
of the prose; an item of a list is a sentence. With --most the command ends with 1 if a page is above it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

WIDTH = 110


def prose(text: str) -> str:
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(?:    (?! *[-*\d]).*\n)+", "", text, flags=re.MULTILINE)  # indented code, folded blocks
    text = re.sub(r"^(?:#.*|\s*\|.*|[!?]{3}.*|={3,}|-{3,}|\.\. .*|:\w+:.*)$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!\[[^]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "code", text)
    return re.sub(r"<[^>]+>|[*_]{1,2}", "", text)


def sentences(text: str) -> Iterator[list[str]]:
    """Each as its words. Colons and semicolons end none."""
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", prose(text)):
        for each in re.split(r"(?<=[.!?])[)\"]?\s+", block):
            words = re.findall(r"[A-Za-z][A-Za-z'-]*", each)
            if len(words) > 2:
                yield words


def syllables(word: str) -> int:
    groups = len(re.findall(r"[aeiouy]+", word.lower()))
    silent = re.search(r"[^aeiouyl]e$|[^aeiouytd]ed$", word.lower()) is not None
    return max(1, groups - silent)


def grade(text: str) -> float:
    found = list(sentences(text))
    words = [word for each in found for word in each]
    if not words:
        return 0.0
    return 0.39 * len(words) / len(found) + 11.8 * sum(map(syllables, words)) / len(words) - 15.59


def too_wide(text: str) -> int:
    """Lines that could be broken: not those of tables and code, nor with an address that is the line."""
    text = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = [re.sub(r"\]\([^)]*\)", "]", line) for line in text.splitlines()]
    return sum(len(line) > WIDTH and not re.match(r"\s*\||    ", line) for line in lines)


def main(arguments: list[str]) -> int:
    most = float("inf")
    if arguments and arguments[0] == "--most":
        most, arguments = float(arguments[1]), arguments[2:]
    above = 0
    print(f"{'page':42}{'words':>7}{'grade':>7}{'longest':>9}{'wide':>6}")
    for path in map(Path, arguments):
        text = path.read_text()
        longest = max((len(each) for each in sentences(text)), default=0)
        above += grade(text) > most
        words = len(text.split())
        print(f"{path!s:42}{words:>7}{grade(text):>7.1f}{longest:>9}{too_wide(text):>6}")
    return int(above > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
