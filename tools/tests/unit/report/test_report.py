"""The report: every section, nothing from a file trusted, rules that know when to be silent."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gradsieve.errors import Malformed
from gradsieve_tools.records import read
from gradsieve_tools.report.findings import findings
from gradsieve_tools.report.gathered import Training, files_of, gather
from gradsieve_tools.report.report import report
from unit.recorded import HEADER, write

SECTIONS = [
    "Loss", "Bits a step", "Link use", "Time by stage, ms a step", "Wait for the exchange",
    "Age of the residual", "Norm of the residual", "Imbalance f(t)", "Density", "Threshold",
    "Who waits for others, ms a step", "Whom the others wait for",
]  # fmt: skip
_VOID = {"meta", "br"}


class Page(HTMLParser):
    """Tags that are opened and closed in order, and the texts in headings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.headings: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == [], self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        assert not any(name.startswith("on") or name == "src" for name, _ in attrs), attrs
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("h1", "h2", "h3"):
            self.headings.append(data)


def made(tmp_path: Path, **changes: object) -> str:
    write(tmp_path / "rec", header=replace(HEADER, **changes))  # type: ignore[arg-type]
    return report(gather(files_of([tmp_path / "rec"])), "a title")


def test_a_page_has_every_section_and_needs_nothing_else(tmp_path: Path) -> None:
    text = made(tmp_path)
    page = Page(text)
    assert page.headings == ["a title", "run", "What to change", *SECTIONS]
    assert "script" not in page.tags
    assert "default-src 'none'" in text
    assert re.findall(r"https?:|//|url\(|@import", text) == []
    assert re.search(r"\bnan\b", text.lower()) is None


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    evil = '"><script>alert(1)</script><img src=x onerror=alert(2)>'
    folder = tmp_path / "rec"
    write(folder, header=replace(HEADER, name=evil, scheme=evil, exchange=evil))
    path = folder / "run.rank0.jsonl"
    path.write_text(path.read_text().replace('"select"', '"<b onload=alert(3)>"'))
    page = Page(report(gather(files_of([folder])), evil))
    assert {"script", "img", "b"} & page.tags == {"b"}, "bold is ours"
    assert evil in "".join(page.headings)
    with pytest.raises(AssertionError):
        Page(f"<p>{evil}</p>")  # as it would be if it were not escaped


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"density": 0.03', '"density": 1.5', "density is 1.5"),
        ('"bits": 0.5', '"bits": -1', "bits is -1"),
        ('"bits": 0.5', '"bits": 1' + "0" * 400, "bits is 1000"),
        ('"select": 0.002', '"select": -1.0', "seconds is"),
        ('"rank": 0', '"rank": 3', "rank 3 of 3"),
        ('"world": 3', '"world": 0', "world is 0"),
        ('"name": "run"', '"name": "' + "x" * 501 + '"', "name is"),
        ('"name": "run"', '"name": "\\u001b[2J"' + ', "evil\\u001b[2J": 1', r"in evil\[2J$"),
        ('{"step": 3', "[" * 60_000, "line 4: not as a record has it"),
        ('"step": 3', '"step": ' + " " * 70_000 + "3", "longer than any"),
        ('"step": 3', f'"step": {2**60}', "step is"),
    ],
)
def test_what_no_recorder_writes_is_refused(old: str, new: str, said: str, tmp_path: Path) -> None:
    path = write(tmp_path / "rec", steps=4)[0]
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(Malformed, match=said):
        read(path)


def training_of(tmp_path: Path, **changes: object) -> Training:
    (training,) = gather(write(tmp_path / "rec", header=replace(HEADER, **changes)))  # type: ignore[arg-type]
    return training


def changes_of(training: Training) -> dict[str, str]:
    return {each.rule: each.figure or "" for each in findings(training) if each.change is not None}


def test_rules_speak_with_their_figures(tmp_path: Path) -> None:
    found = changes_of(training_of(tmp_path))
    assert found == {
        "training waits for the exchange": "30% of a step",
        "the others wait for one rank": "rank 2 last in 100% of the steps, others wait 30% of a step",
        "uneven selections, f(t)": "3.00",
        "rows cut": "50.0% of the ranks",
        "density is what was asked for": "0.03 for a target of 0.01",
    }


def sent(tmp_path: Path, scheme: str, density: float, budget: str, bits: float, seen: float) -> Training:
    """Stripes that send all elements in a step, or whatever `seen` says, by so many bits."""
    training = training_of(tmp_path, scheme=scheme, density=density, budget=budget)
    training.columns["density"][:], training.columns["bits"][:] = seen, bits
    return training


def advice_of(training: Training, rule: str) -> str:
    (found,) = (each.change or "" for each in findings(training) if each.rule == rule)
    return found


PLAIN = "train with plain DistributedDataParallel"
DENSE = 64 * 2 / 3
"""Bits, among three ranks."""


@pytest.mark.parametrize(
    ("scheme", "density", "budget", "bits", "seen", "said"),
    [
        ("stripes", 0.3, "2", 2.0, 1.0, ""),
        ("stripes", 0.3, "0.75", 0.75, 0.4, ""),
        ("stripes", 0.3, "50", DENSE, 1.0, f"bits=50 sends everything as it is: give less, or {PLAIN}"),
        ("stripes", 0.3, "auto", 2.0, 1.0, ""),
        ("stripes", 0.3, "auto", DENSE, 1.0, f"Everything was sent as it is, and hid: {PLAIN}"),
        ("stripes", 0.3, "", 0.6, 0.3, ""),
        ("exdyna", 0.01, "", 0.6, 0.01, ""),
        ("exdyna", 0.01, "", DENSE, 1.0, f"Dense was faster here by itself: {PLAIN}"),
        ("dense", 1.0, "", DENSE, 1.0, ""),
    ],
)
def test_plain_ddp_is_advised_only_where_as_much_is_sent(
    scheme: str, density: float, budget: str, bits: float, seen: float, said: str, tmp_path: Path
) -> None:
    found = advice_of(sent(tmp_path, scheme, density, budget, bits, seen), "steps that went dense")
    assert found.startswith(said) if said else found == ""
