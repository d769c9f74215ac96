"""After close() DDP is DDP; attach works a second time; an attach that failed leaves nothing behind."""

from __future__ import annotations

import contextlib
import copy
import textwrap
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from gradsieve.testing.laws import same_bits
from multiproc.harness import Ranks
from multiproc.outside import Lines, torchrun
from multiproc.training import GRADIENTS

PRESETS = {"steps": gradsieve.Steps(), "gradients": GRADIENTS}


def new_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.125)


def train(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(step * 10 + rank))
        ddp(inputs).square().mean().backward()
        optimizer.step()


def closed_then_dense(rank: int, exchange: str) -> bool:
    """Whether a closed sync leaves plain DDP: the same bits as DDP from the same start."""
    model, optimizer = new_model()
    ddp = DistributedDataParallel(model)
    sync = gradsieve.attach(ddp, optimizer, density=0.1, exchange=PRESETS[exchange])
    train(ddp, optimizer, rank, range(5))
    sync.flush()
    if exchange == "gradients":
        optimizer.step()
    sync.close()
    sync.close()
    plain, plain_optimizer = new_model()
    plain.load_state_dict(model.state_dict())
    train(ddp, optimizer, rank, range(5, 9))
    train(DistributedDataParallel(plain), plain_optimizer, rank, range(5, 9))
    return same_bits([p.detach() for p in model.parameters()], [p.detach() for p in plain.parameters()])


@pytest.mark.parametrize("exchange", PRESETS)
def test_after_close_ddp_is_plain(two: Ranks, exchange: str) -> None:
    assert two.run(closed_then_dense, exchange) == [True, True]


def in_a_block(rank: int, exchange: str) -> list[list[Tensor]]:
    """The model after a `with` block, and after the calls that it stands for."""
    out = []
    for block in (True, False):
        model, optimizer = new_model()
        ddp = DistributedDataParallel(model)
        sync = gradsieve.attach(ddp, optimizer, density=0.1, exchange=PRESETS[exchange])
        if block:
            with sync as same:
                assert same is sync
                train(ddp, optimizer, rank, range(5))
        else:
            train(ddp, optimizer, rank, range(5))
            sync.flush()
            if exchange == "gradients":
                optimizer.step()
            sync.close()
        assert sync.is_closed
        out.append([p.detach().clone() for p in model.parameters()])
    return out


@pytest.mark.parametrize("exchange", PRESETS)
def test_a_block_ends_with_all_residuals_sent(two: Ranks, exchange: str) -> None:
    (block, calls), other = two.run(in_a_block, exchange)
    assert same_bits(block, calls)
    assert same_bits([block, calls], other)


def block_that_raises(rank: int) -> list[bool]:
    model, optimizer = new_model()
    ddp = DistributedDataParallel(model)
    sync = gradsieve.attach(ddp, optimizer, density=0.1)
    with mock.patch.object(sync, "flush", wraps=sync.flush) as flush, contextlib.suppress(KeyError), sync:
        train(ddp, optimizer, rank, range(3))
        raise KeyError
    return [sync.is_closed, flush.called]


def test_a_block_that_raises_is_closed_and_not_flushed(two: Ranks) -> None:
    assert two.run(block_that_raises) == [[True, False]] * 2


def attached_to_a_copy(rank: int) -> tuple[int, list[Tensor]]:
    """A copy has no hook behind its door: attaching to it hangs a new one."""
    model, optimizer = new_model()
    ddp = DistributedDataParallel(model)
    gradsieve.attach(ddp, optimizer, density=0.1)
    copied = copy.deepcopy(ddp)
    optimizer = torch.optim.SGD(copied.parameters(), lr=0.125)
    sync = gradsieve.attach(copied, optimizer, density=0.1)
    train(copied, optimizer, rank, range(6))
    sync.flush()
    return sync.pipeline.step, [p.detach().clone() for p in copied.parameters()]


def test_attach_works_on_a_copy(two: Ranks) -> None:
    (steps, first), (_, second) = two.run(attached_to_a_copy)
    assert steps == 7, "six and the flush"
    assert same_bits(first, second)


def closed_with_something_waiting(rank: int, flushes: bool) -> tuple[list[str], list[Tensor]]:
    said, (model, optimizer) = Lines(), new_model()
    sync = gradsieve.attach(ddp := DistributedDataParallel(model), optimizer, density=0.05)
    train(ddp, optimizer, rank, range(6))
    if flushes:
        sync.flush()
    sync.close()
    return [line for line in said.lines if "close()" in line], [
        p.detach().clone() for p in model.parameters()
    ]


def test_close_says_what_it_leaves_behind(two: Ranks) -> None:
    (lines, first), (_, second) = two.run(closed_with_something_waiting, False)
    assert "call flush() before that, on all ranks" in lines[0]
    assert same_bits(first, second), "all ranks have the shared model"
    (lines, first), (_, second) = two.run(closed_with_something_waiting, True)
    assert lines == []
    assert same_bits(first, second)


SCRIPT = """
    import atexit, os, torch, gradsieve, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    dist.init_process_group("gloo")
    syncs = []
    for model in (torch.nn.Linear(40, 40), torch.nn.Linear(40, 40)):
        ddp, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1)
        syncs.append(gradsieve.attach(ddp, optimizer, density=0.1))
        for step in range(5):
            optimizer.zero_grad()
            ddp(torch.randn(4, 40)).sum().backward()
            optimizer.step()
        syncs[-1].flush()
    syncs[0].close()
    dist.destroy_process_group()
    atexit._run_exitfuncs()
    os._exit(0)
"""
"""One sync is closed, the other is not. Ends by itself: torch's threads and the end of Python race, with
plain DDP too (one abort in a hundred)."""


def test_nothing_is_printed_at_the_end(tmp_path: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = torchrun(script)
    assert done.stdout == ""
    said = [
        line for line in done.stderr.splitlines() if "ranks, compiled kernels: attach(model, SGD" not in line
    ]
    assert said == [], "besides what attach() says"
