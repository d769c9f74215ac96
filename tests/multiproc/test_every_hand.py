"""Ordinary trainings that once ended wrong; `just mutants` undoes what was mended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from gradsieve.errors import ConfigError
from multiproc.harness import Ranks
from unit.test_optimizers import Averaged, Master

WIDE = 48


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE)).to(dtype)


def same(tensors: Any) -> bool:
    """The same bits on all ranks."""
    mine = torch.cat([each.detach().float().flatten() for each in tensors])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return all(torch.equal(everyone[0].view(torch.int32), each.view(torch.int32)) for each in everyone)


def noise(rank: int) -> Callable[[], Tensor]:
    source = torch.Generator().manual_seed(1 + rank)
    return lambda: torch.randn(4, WIDE, generator=source)


def step(ddp: nn.Module, optimizer: Any, batch: Tensor) -> None:
    optimizer.zero_grad()
    (ddp(batch) - batch.roll(1, 1)).square().mean().backward()
    optimizer.step()


# -- optimizers -------------------------------------------------------------------------------------------


def two_models_one_optimizer(rank: int) -> bool:
    """Whether the user's rate and decay are what they were, before, within and after every step."""
    draw, nets = noise(rank), [DistributedDataParallel(network()) for _ in range(2)]
    optimizer = torch.optim.AdamW([p for net in nets for p in net.parameters()], lr=1e-3)
    syncs = [gradsieve.attach(net, optimizer, bits=0.75) for net in nets]
    seen: set[tuple[float, float]] = set()
    note = lambda *_: seen.update((g["lr"], g["weight_decay"]) for g in optimizer.param_groups)  # noqa: E731
    optimizer.register_step_pre_hook(note)
    optimizer.register_step_post_hook(note)
    for _ in range(20):
        optimizer.zero_grad()
        batch = draw()
        (nets[1](torch.tanh(nets[0](batch))) - draw()).square().mean().backward()
        optimizer.step()
        note()
    assert syncs[0].pipeline.rho < 0.9, "nothing had to be lengthened"
    for sync in syncs:
        sync.flush()
        sync.close()
    return seen == {(1e-3, 1e-2)}


def rate_in_a_hook(rank: int) -> list[float]:
    """Length of the steps in a training whose rate the loop sets, and in one in which a hook does."""
    ways = []
    for how in ("loop", "hook"):
        draw, net = noise(rank), DistributedDataParallel(network())
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.0, weight_decay=0.5)

        def schedule(*_: Any, optimizer: Any = optimizer) -> None:
            optimizer.param_groups[0]["lr"] = 1e-2

        sync = gradsieve.attach(net, optimizer, bits=2.0)
        if how == "hook":
            optimizer.register_step_pre_hook(schedule)
        for _ in range(20):
            if how == "loop":
                schedule()
            step(net, optimizer, draw())
        sync.flush()
        ways.append(float(torch.cat([p.detach().flatten() for p in net.parameters()]).norm()))
        assert optimizer.param_groups[0]["weight_decay"] == 0.5
        sync.close()
    return ways


class Averaging(Averaged):
    """By its own name in the refusal."""


class NoTorch:
    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": list(params), "lr": 0.1}]

    def step(self) -> None: ...


def master_weights(rank: int) -> float:
    """Loss on all inputs, of which each rank sees one half."""
    torch.manual_seed(0)
    model = nn.Linear(32, 32, bias=False).bfloat16()
    net = DistributedDataParallel(model)
    optimizer = Master(net.parameters(), lr=0.2)
    sync = gradsieve.attach(net, optimizer, scheme="topk", density=1.0)
    source = torch.Generator().manual_seed(7)
    target, mask = torch.randn(32, 32, generator=source) / 6, torch.zeros(32)
    mask[16 * rank : 16 * rank + 16] = 1.0
    torch.manual_seed(1 + rank)
    for _ in range(200):
        x = torch.randn(64, 32) * mask
        optimizer.zero_grad()
        ((net(x.bfloat16()).float() - x @ target.T).square().mean() * 16).backward()
        optimizer.step()
    sync.flush()
    x = torch.randn(512, 32, generator=source)
    sync.close()
    return float((x @ model.weight.detach().float().T - x @ target.T).square().mean())


def refused(rank: int, kind: type[Any]) -> str:
    net = DistributedDataParallel(network())
    optimizer = kind(net.parameters(), lr=0.1) if kind is Averaging else kind(net.parameters())
    try:
        gradsieve.attach(net, optimizer, bits=0.75).close()
    except ConfigError as error:
        return str(error)
    return ""


def closed_and_gone_on(rank: int, kind: type[Any], settings: dict[str, Any], steps: int) -> bool:
    draw, net = noise(rank), DistributedDataParallel(network())
    optimizer = kind(net.parameters(), **settings)
    sync = gradsieve.attach(net, optimizer, bits=0.75)
    for _ in range(30):
        step(net, optimizer, draw())
    sync.flush()
    sync.close()
    for _ in range(steps):
        step(net, optimizer, draw())
    return same(net.parameters())


def compiled_step(rank: int) -> tuple[float, bool]:
    """How far a training with a compiled step ends from one without; and whether replicas are the same."""
    ends = []
    for compiled in (False, True):
        draw, net = noise(rank), DistributedDataParallel(network())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        sync = gradsieve.attach(net, optimizer, scheme="topk", density=1.0)

        def take(optimizer: Any = optimizer) -> None:
            optimizer.step()

        take = torch.compile(take, backend="eager") if compiled else take
        for _ in range(10):
            optimizer.zero_grad()
            (net(draw()) - 1.0).square().mean().backward()
            take()
        sync.flush()
        ends.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
        sync.close()
    return float((ends[0] - ends[1]).abs().max()), same([ends[1]])


def replaced_group(rank: int) -> bool:
    """Whether steps of parameters that were put into a group later are exchanged."""
    draw, net = noise(rank), DistributedDataParallel(network())
    optimizer = torch.optim.SGD(net.module[0].parameters(), lr=0.1)
    sync = gradsieve.attach(net, optimizer, scheme="topk", density=1.0)
    start = net.module[2].weight.detach().clone()
    for number in range(12):
        if number == 4:
            optimizer.param_groups[0]["params"] = list(net.module[2].parameters())
        net.zero_grad()
        (net(draw()) - 1.0).square().mean().backward()
        optimizer.step()
    alike = same(net.parameters()) and bool((net.module[2].weight.detach() != start).all())
    sync.close()
    return alike


GONE_ON = [(torch.optim.AdamW, {"lr": 1e-3}), (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})]


def test_two_syncs_of_one_optimizer_leave_its_settings_alone(two: Ranks) -> None:
    assert two.run(two_models_one_optimizer) == [True, True]


def test_a_rate_that_a_hook_sets_is_the_rate(two: Ranks) -> None:
    for loop, hook in two.run(rate_in_a_hook):
        assert loop == hook


def test_master_weights_follow_what_others_send(two: Ranks) -> None:
    for loss in two.run(master_weights):
        assert loss < 1e-3


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Averaging, "Averaging computes the parameters from weights"),
        (NoTorch, "NoTorch is not a torch.optim.Optimizer"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(two: Ranks, kind: Any, said: str) -> None:
    for each in two.run(refused, kind):
        assert said in each


@pytest.mark.parametrize(("kind", "settings"), GONE_ON)
def test_replicas_stay_equal_after_close(two: Ranks, kind: Any, settings: dict[str, Any]) -> None:
    assert two.run(closed_and_gone_on, kind, settings, 500) == [True, True]


def test_a_compiled_step_is_a_step(two: Ranks) -> None:
    for apart, alike in two.run(compiled_step):
        assert apart < 1e-5
        assert alike


def test_parameters_of_a_group_can_be_replaced(two: Ranks) -> None:
    assert two.run(replaced_group) == [True, True]


# -- the shared model is what people see ------------------------------------------------------------------


def cached_casts(rank: int) -> bool:
    """Whether an evaluation inside the training's autocast, before its backward, is the shared model's."""
    draw, net = noise(rank), DistributedDataParallel(network())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    sync = gradsieve.attach(net, optimizer, bits=0.75)
    for _ in range(5):
        step(net, optimizer, draw())
    fixed = torch.ones(2, WIDE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        net(draw()).square().mean()
        net.eval()
        with torch.no_grad():
            value = net(fixed).float()
        net.train()
    alike = same([value])
    sync.close()
    return alike


def gradient_penalty(rank: int) -> tuple[float, bool]:
    """A second backward through the graph of the first (WGAN-GP): how far from the same without a sync's
    exchange, where all is exchanged and ranks have the same data."""
    ends = []
    for attached in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv1d(1, 4, 3), nn.Tanh(), nn.Conv1d(4, 1, 3))
        net = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        settings: Any = {"scheme": "topk", "density": 1.0}
        sync = gradsieve.attach(net, optimizer, **settings) if attached else None
        source = torch.Generator().manual_seed(5)
        for _ in range(10):
            x = torch.randn(4, 1, 16, generator=source).requires_grad_()
            optimizer.zero_grad()
            out = net(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            (out.square().mean() + (slope.norm() - 1).square()).backward()
            optimizer.step()
        if sync is not None:
            sync.flush()
            sync.close()
        ends.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    return float((ends[0] - ends[1]).abs().max()), same([ends[1]])


def test_casts_of_one_model_are_not_used_for_the_other(two: Ranks) -> None:
    assert two.run(cached_casts) == [True, True]


def test_a_second_backward_finds_what_its_forward_had(two: Ranks) -> None:
    for apart, alike in two.run(gradient_penalty):
        assert apart < 1e-4
        assert alike


# -- what users write ---------------------------------------------------------------------------------------


def clamped(rank: int, dtype: torch.dtype, through_data: bool) -> float:
    """The largest weight one step after weights were clipped, as a WGAN's critic clips them."""
    torch.manual_seed(0)
    model = nn.Linear(WIDE, WIDE, bias=False).to(dtype)
    net = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    sync = gradsieve.attach(net, optimizer, bits=2.0)
    torch.manual_seed(1 + rank)
    for number in range(9):
        optimizer.zero_grad()
        (net(torch.randn(8, WIDE, dtype=dtype)) * 10).square().mean().backward()
        optimizer.step()
        if number < 8:
            with torch.no_grad():
                (model.weight.data if through_data else model.weight).clamp_(-0.01, 0.01)
    largest = float(model.weight.detach().abs().max())
    sync.close()
    return largest


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_user_wrote_is_there(two: Ranks, dtype: torch.dtype, through_data: bool) -> None:
    for largest in two.run(clamped, dtype, through_data):
        assert largest < 0.03


def attached_again(rank: int, is_whole: bool) -> str:
    """What is said of a second sync for one layer of a model, or for all of it, wrapped again."""
    layer = nn.Linear(8, 8)
    heads = [nn.Linear(8, 4) for _ in range(2)]
    one, other = (
        DistributedDataParallel(nn.Sequential(layer, heads[0 if is_whole else at])) for at in range(2)
    )
    optimizer = torch.optim.SGD([p for module in (layer, *heads) for p in module.parameters()], lr=0.1)
    first = gradsieve.attach(one, optimizer, bits=0.75)
    try:
        gradsieve.attach(other, optimizer, bits=0.75).close()
    except ConfigError as error:
        return str(error)
    finally:
        first.close()
    return ""


@pytest.mark.parametrize(
    ("is_whole", "expected"),
    [
        (False, "0.weight, 0.bias belongs to another model to which a sync is attached"),
        (True, "have a sync already, from when this model was wrapped before: call its close() first"),
    ],
)
def test_a_parameter_has_one_owner(two: Ranks, is_whole: bool, expected: str) -> None:
    for said in two.run(attached_again, is_whole):
        assert expected in said


def graphs_that_are_left(rank: int) -> list[bool]:
    """Whether a graph that outlives the exchange's backward has the gradient of the model with which it was
    recorded: one that was kept, and one of a second forward."""
    alike = []
    for second in (False, True):
        # A norm's weight is read where the parameter is in backward; a Linear's where it was in forward.
        draw, net = noise(rank), DistributedDataParallel(network().append(nn.LayerNorm(WIDE)))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        sync = gradsieve.attach(net, optimizer, bits=2.0)
        for _ in range(5):
            step(net, optimizer, draw())
        optimizer.zero_grad()
        batch, target = draw(), draw()
        with net.no_sync():
            later = (net(batch) - target).square().mean() if second else None
        loss = (net(batch) - target).square().mean()
        gradients = []
        loss.backward(retain_graph=not second)
        for left in (loss if later is None else later, None):
            gradients.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
            optimizer.zero_grad()
            if left is not None:
                with net.no_sync():
                    left.backward()
        alike.append(torch.equal(*gradients))
        sync.close()
    return alike


def test_graphs_that_are_left_have_the_model_they_were_recorded_with(two: Ranks) -> None:
    for kept, of_a_second_forward in two.run(graphs_that_are_left):
        assert kept
        assert of_a_second_forward
