"""A few steps on real ranks, one of which keeps a file open now and then: the long run is a command."""

from __future__ import annotations

from typing import Any, ClassVar
from unittest import mock

from gradsieve import kernels
from gradsieve_tools.soak import rank as ranks
from gradsieve_tools.soak.rank import Soak, SoakTraining, be_rank
from gradsieve_tools.soak.run import soaked


class Leaking(SoakTraining):
    kept: ClassVar[list[Any]] = []

    def step(self, step: int) -> None:
        super().step(step)
        if self.rank and not step % 6:
            self.kept.append(open("/dev/null"))  # noqa: SIM115 - which is the fault


def be_leaking_rank(rank: int, soak: Soak, pipe: Any) -> None:
    often = {"EVALUATES": 5, "FLUSHES": 8, "SAVES": 12, "ASKS": 2, "SoakTraining": Leaking}
    with kernels.using("torch"), mock.patch.multiple(ranks, **often):
        be_rank(rank, soak, pipe)


def test_a_rank_that_leaves_files_open_is_found_and_the_other_is_not() -> None:
    lines, looks = soaked("stripes", 36, be_leaking_rank)
    found = {(line.rank, line.measure): line.is_good for line in lines}
    assert not found[1, "files"]
    assert found[0, "files"]
    assert found[0, "threads"]
    assert found[1, "threads"]
    assert [len(each) for each in looks] == [36, 36]
