"""The fuzzer itself: what it should find it finds, it repeats what it did, honest messages are let in."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from random import Random

import pytest

from gradsieve_tools.cli.main import main
from gradsieve_tools.fuzz import targets
from gradsieve_tools.fuzz.entry_points import files, pipelines, readers
from gradsieve_tools.fuzz.entry_points.entry_point import REFUSED, EntryPoint
from gradsieve_tools.fuzz.forge import altered
from gradsieve_tools.fuzz.mutate import mutant
from gradsieve_tools.fuzz.run import Fuzz

DOORS = [*readers.on_the_host(), *readers.on_the_device(), *pipelines.entries()]
FILES = [*files.of_tensors(), *files.of_folders()]
A_FEW = (
    targets.Family("readers", 0.9, readers.on_the_host),
    targets.Family("pipelines", 0.1, pipelines.entries),
)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(targets.TARGETS, "few", A_FEW)


@pytest.mark.parametrize("entry", DOORS, ids=lambda entry: entry.name)
def test_honest_messages_are_let_in_and_altered_ones_read_or_refused(entry: EntryPoint) -> None:
    entry.enter(bytearray(entry.honest[0]))
    source = Random(0)
    for _ in range(20):
        forged = mutant(source, entry)
        assert len(forged) == len(entry.honest[0])
        try:
            entry.enter(forged)
        except REFUSED:
            continue


@pytest.mark.parametrize("entry", FILES, ids=lambda entry: entry.name)
def test_honest_files_are_let_in_and_altered_ones_read_or_refused(entry: EntryPoint) -> None:
    source, refused, lengths = Random(0), set[int | None](), set[int]()
    entry.enter(bytearray(entry.honest[0]))
    for _ in range(60):
        forged = altered(source, entry)
        lengths.add(len(forged) - len(entry.honest[0]))
        try:
            entry.enter(forged)
        except REFUSED as error:
            refused.add(traceback.extract_tb(error.__traceback__)[-1].lineno)
    assert min(lengths) < 0 < max(lengths)
    assert len(refused) > 1  # by several checks, and not all by the first


def test_every_fault_is_found_with_its_number_and_the_rest_is_still_read() -> None:
    """Crashes and hangs end a process; where there are more messages, another one goes on."""
    faulty = Path(__file__).with_name("faulty_worker.py")
    report = Fuzz([sys.executable, str(faulty)], lambda *_: None, hangs=1.0).run(7, 1)
    found = {finding.case: finding.what for finding in report.findings}
    assert sorted(found) == [2, 3, 4, 5, 6]
    assert "IndexError: out of range" in found[2]
    assert "MemoryError" in found[3]
    assert "died of SIGABRT" in found[4]
    assert "MemoryError" in found[5]  # three copies; two are as many as may be
    assert "hung for 1 s" in found[6]


@pytest.mark.usefixtures("few")
def test_the_same_seed_and_number_are_the_same_message() -> None:
    cases, again, other = targets.Cases("few", 3), targets.Cases("few", 3), targets.Cases("few", 4)
    made = [cases.case(number) for number in range(50)]
    assert [(each[1].name, each[2]) for each in made] == [
        (entry.name, frame) for _, entry, frame in map(again.case, range(50))
    ]
    assert [each[2] for each in made] != [other.case(number)[2] for number in range(50)]
    for number in (300, 7, 256, 8):  # in any order: the one that was found is made again without the others
        assert again.case(number)[2] == [cases.case(each)[2] for each in range(number + 1)][-1]


@pytest.mark.usefixtures("few")
def test_one_message_can_be_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "fuzz", "--target", "few", "--case", "7"]) == 0
    said = capsys.readouterr().out
    assert "read" in said or "refused" in said
