"""The command that says how hard pages are to read."""

from __future__ import annotations

from pathlib import Path

import pytest
import reading

EASY = "The rank sends a part. It keeps the rest.\n"
HARD = "Notwithstanding considerable heterogeneity, asynchronous participants communicate selectively.\n"


def test_long_words_in_long_sentences_are_harder() -> None:
    assert reading.grade(EASY) < 5 < 15 < reading.grade(HARD)


@pytest.mark.parametrize(
    "hidden", [f"```\n{HARD}```\n", f"| {HARD.strip()} |\n", f"# {HARD}", f"<!-- {HARD} -->\n", f"    {HARD}"]
)
def test_what_is_no_prose_does_not_count(hidden: str) -> None:
    assert reading.grade(EASY + "\n" + hidden) == reading.grade(EASY)


def test_items_of_a_list_are_sentences() -> None:
    items = "- one two three four\n- five six seven eight\n"
    assert [len(each) for each in reading.sentences(items)] == [4, 4]


def test_wide_lines_are_counted_but_not_those_of_tables_and_code() -> None:
    wide = "word " * 30
    assert reading.too_wide(f"{wide}\n") == 1
    assert reading.too_wide(f"| {wide} |\n```\n{wide}\n```\n[a](https://example.org/{'x' * 120})\n") == 0


def test_the_exit_code_says_whether_a_page_is_too_hard(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(HARD)
    assert reading.main(["--most", "9", str(page)]) == 1
    page.write_text(EASY)
    assert reading.main(["--most", "9", str(page)]) == 0
