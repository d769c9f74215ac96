"""Ordinary trainings that once ended wrong, each with a twin: the mend undone, and the same test is red."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import gradsieve
from gradsieve import optimizers, step_length
from gradsieve.errors import ConfigError
from gradsieve.feedback.local_steps import LocalSteps
from gradsieve.hooks import CommHook, OptimizerHooks
from gradsieve.optimizers import Experiment, Traits, traits_of
from gradsieve.parallel.attached import Attached, Graph, Phase
from gradsieve.step_length import StepLength
from multiproc.harness import RankFailure, Ranks
from unit.test_optimizers import ADAMW, Averaged, Master

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


# -- what undoes a mend, inside of a rank -------------------------------------------------------------------


@contextlib.contextmanager
def undone(what: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for target, name, instead in UNDONE[what]:
            stack.enter_context(mock.patch.object(target, name, instead))
        yield


def _scaled_rates(self: StepLength, optimizer: Any, names: Any, noise: Any, rho: float, size: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= rho**-0.5


def _hooks_last(self: OptimizerHooks, optimizer: Any) -> None:
    if optimizer not in self._after:
        self._after[optimizer] = optimizer.register_step_post_hook(self.after)


def _no_taking_over(self: Attached) -> None:
    self.replica.views.show_shared(raise_version=False)
    self._rest()


_backward_ended, _reach = Attached.backward_ended, Attached.reach


def _no_graph_waits(self: Attached) -> None:
    self._graphs = []
    _backward_ended(self)


def _reached_only_once(self: Attached, graph: Graph) -> None:
    if self.phase is not Phase.RESTING:
        _reach(self, graph)


def _by_lengths(self: Any, optimizer: Any) -> Any:
    known = self._known.get(optimizer)
    if known is None:
        names = {self._names[id(p)] for group in optimizer.param_groups for p in group["params"]}
        known = self._known[optimizer] = ([], frozenset(names))
    return known[1]


UNDONE: dict[str, list[tuple[Any, str, Any]]] = {
    "nothing": [],
    "rates are scaled": [(StepLength, "before", _scaled_rates)],
    "users' hooks come first": [(OptimizerHooks, "come_first", _hooks_last)],
    "a step takes over": [(Attached, "backward_ended", _no_taking_over)],
    "a step leaves its model": [(Attached, "_end_step", lambda self, _: self._rest())],
    "casts are kept": [(torch, "clear_autocast_cache", lambda: None)],
    "writing is seen by version": [(LocalSteps, "notice_writing", lambda self: None)],
    "writing is not compared": [
        (LocalSteps, "_take_from_narrow", lambda self, name: bool(self._narrow[name].sum() > -torch.inf)),
    ],
    "graphs are reached once": [(Attached, "reach", _reached_only_once)],
    "no graph waits": [
        (Attached, "backward_ended", _no_graph_waits),
        (Attached, "reach", _reached_only_once),
    ],
    "moments stay": [(CommHook, "catch_up", lambda self: None)],
    "all gradients are large": [
        (step_length, "traits_of", lambda optimizer, group, _=0.0: traits_of(optimizer, group))
    ],
    "copies stay": [(step_length, "follow", lambda weights, parameter: None)],
    "anything may keep weights": [(Experiment, "copies", lambda self: ())],
    "groups are counted": [(OptimizerHooks, "names_in", _by_lengths)],
    "a parameter may have two owners": [
        (gradsieve.sync.gradient_sync, "_refuse_taken", lambda held, exchange: None)
    ],
}


# -- optimizers -------------------------------------------------------------------------------------------


def two_models_one_optimizer(rank: int, undo: str) -> bool:
    """Whether the user's rate and decay are what they were, before, within and after every step."""
    with undone(undo):
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


def rate_in_a_hook(rank: int, undo: str) -> list[float]:
    """Length of the steps in a training whose rate the loop sets, and in one in which a hook does."""
    ways = []
    for how in ("loop", "hook"):
        with undone(undo):
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


def fused_with_an_overflow(rank: int, undo: str) -> list[Traits]:
    """What is found out of a fused AdamW in a step in which this rank's GradScaler found an overflow."""
    with undone(undo):
        draw, net = noise(rank), DistributedDataParallel(network())
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
        sync = gradsieve.attach(net, optimizer, bits=0.75)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for number in range(12):
            loss = (net(draw()) - draw()).square().mean()
            if rank == 0 and number < 8:
                loss = loss * 1e38
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        sync.close()
        return list(optimizers._known[optimizer].values())


def large_eps(rank: int, undo: str) -> float:
    """Way made over dense's by an Adam whose eps is far above its gradients; all is exchanged at once."""
    ways = []
    for attached in (False, True):
        with undone(undo):
            torch.manual_seed(0)
            net = DistributedDataParallel(nn.Linear(WIDE, WIDE, bias=False))
            optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, eps=1.0)
            start, draw = net.module.weight.detach().clone(), noise(rank)
            settings: Any = {"scheme": "topk", "density": 1.0}
            sync = gradsieve.attach(net, optimizer, **settings) if attached else None
            for _ in range(60):
                optimizer.zero_grad()
                (1e-3 * (net(draw()) * draw()).sum()).backward()
                optimizer.step()
            if sync is not None:
                sync.flush()
                sync.close()
            ways.append(float((net.module.weight.detach() - start).norm()))
    return ways[1] / ways[0]


class Averaging(Averaged):
    """By its own name in the refusal."""


class NoTorch:
    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": list(params), "lr": 0.1}]

    def step(self) -> None: ...


def master_weights(rank: int, undo: str) -> float:
    """Loss on all inputs, of which each rank sees one half."""
    with undone(undo):
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


def refused(rank: int, undo: str, kind: type[Any]) -> str:
    with undone(undo):
        net = DistributedDataParallel(network())
        optimizer = kind(net.parameters(), lr=0.1) if kind is Averaging else kind(net.parameters())
        try:
            gradsieve.attach(net, optimizer, bits=0.75).close()
        except ConfigError as error:
            return str(error)
        return ""


def closed_and_gone_on(rank: int, undo: str, kind: type[Any], settings: dict[str, Any], steps: int) -> bool:
    with undone(undo):
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


def compiled_step(rank: int, undo: str) -> tuple[float, bool]:
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


def replaced_group(rank: int, undo: str) -> bool:
    """Whether steps of parameters that were put into a group later are exchanged."""
    with undone(undo):
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
    assert two.run(two_models_one_optimizer, "nothing") == [True, True]
    assert two.run(two_models_one_optimizer, "rates are scaled") == [False, False]


def test_a_rate_that_a_hook_sets_is_the_rate(two: Ranks) -> None:
    for loop, hook in two.run(rate_in_a_hook, "nothing"):
        assert loop == hook


def test_an_overflow_does_not_hide_what_an_optimizer_is(two: Ranks) -> None:
    for found in two.run(fused_with_an_overflow, "nothing"):
        assert len(found) > 1, "at attach() only, and not with gradients as they are"
        assert set(found) == {ADAMW}


def test_adam_that_steps_as_sgd_is_not_lengthened(two: Ranks) -> None:
    for ratio in two.run(large_eps, "nothing"):
        assert ratio == pytest.approx(1.0, abs=0.1)
    for ratio in two.run(large_eps, "all gradients are large"):
        assert ratio > 1.25


def test_master_weights_follow_what_others_send(two: Ranks) -> None:
    for loss in two.run(master_weights, "nothing"):
        assert loss < 1e-3
    for loss in two.run(master_weights, "copies stay"):
        assert loss > 0.1


@pytest.mark.parametrize(
    ("kind", "said", "undo"),
    [
        (Averaging, "Averaging computes the parameters from weights", "anything may keep weights"),
        (NoTorch, "NoTorch is not a torch.optim.Optimizer", "nothing"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(two: Ranks, kind: Any, said: str, undo: str) -> None:
    for each in two.run(refused, "nothing", kind):
        assert said in each
    if undo != "nothing":
        assert two.run(refused, undo, kind) == ["", ""]


@pytest.mark.parametrize(("kind", "settings"), GONE_ON)
def test_replicas_stay_equal_after_close(two: Ranks, kind: Any, settings: dict[str, Any]) -> None:
    assert two.run(closed_and_gone_on, "nothing", kind, settings, 500) == [True, True]
    assert two.run(closed_and_gone_on, "moments stay", kind, settings, 1) == [False, False]


def test_a_compiled_step_is_a_step(two: Ranks) -> None:
    for apart, alike in two.run(compiled_step, "nothing"):
        assert apart < 1e-5
        assert alike


def test_parameters_of_a_group_can_be_replaced(two: Ranks) -> None:
    assert two.run(replaced_group, "nothing") == [True, True]
    assert two.run(replaced_group, "groups are counted") != [True, True]


# -- the shared model is what people see ------------------------------------------------------------------


def seen_by_averages(rank: int, undo: str) -> tuple[bool, bool, bool]:
    """Averages in the loop, with a step that a GradScaler skips on one rank; in a hook; the parameters."""
    with undone(undo):
        draw, net = noise(rank), DistributedDataParallel(network())
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        sync = gradsieve.attach(net, optimizer, bits=0.75)
        loop, hook = (AveragedModel(net.module, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for _ in range(2))
        seen: list[bool] = []
        optimizer.register_step_post_hook(lambda *_: hook.update_parameters(net.module))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for number in range(14):
            batch = draw()
            loss = (net(batch) - batch).square().mean()
            if rank == 1 and number == 10:
                loss = loss * float("inf")
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if number < 10:  # a hook runs on those that step
                scaler.step(optimizer)
                if number == 9:
                    in_hook = copy.deepcopy(hook)
            else:
                scaler.step(optimizer)
            scaler.update()
            loop.update_parameters(net.module)
            seen.append(same(net.parameters()))
        sync.close()
        return same(loop.parameters()), same(in_hook.parameters()), all(seen)


def gan(rank: int, undo: str) -> tuple[bool, bool]:
    """Whether the generator's parameters and their average are the same on ranks after whole iterations."""
    with undone(undo):
        draw, (g, d) = noise(rank), (DistributedDataParallel(network()) for _ in range(2))
        og, od = (torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (g, d))
        syncs = [gradsieve.attach(g, og, bits=0.75), gradsieve.attach(d, od, bits=0.75)]
        average, alike = AveragedModel(g.module, multi_avg_fn=get_ema_multi_avg_fn(0.9)), True
        for _ in range(8):
            og.zero_grad()
            d(g(draw())).square().mean().backward()
            og.step()
            average.update_parameters(g.module)
            fake = g(draw()).detach()
            od.zero_grad()
            (d(draw()).square().mean() - d(fake).square().mean()).backward()
            od.step()
            with syncs[0].shared_model():  # that forward has no backward: g holds this rank's own model
                alike &= same(g.parameters()) and same(d.parameters())
        for sync in syncs:
            sync.close()
        return alike, same(average.parameters())


def cached_casts(rank: int, undo: str) -> bool:
    """Whether an evaluation inside the training's autocast, before its backward, is the shared model's."""
    with undone(undo):
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


def gradient_penalty(rank: int, undo: str) -> tuple[float, bool]:
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


def forward_alone(rank: int, undo: str) -> bool:
    """On rank 0, in training mode; then a copy, a barrier, training, and a flush right after another one."""
    draw, net = noise(rank), DistributedDataParallel(network())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sync = gradsieve.attach(net, optimizer, bits=0.75)
    for number in range(6):
        step(net, optimizer, draw())
        if rank == 0 and number % 2:
            (net if number == 1 else net.module)(draw())
            net.module.state_dict()
            sync.state_dict()
        if number == 3:
            dist.barrier()
    sync.flush()
    step(net, optimizer, draw())
    alike = same(net.parameters())
    sync.flush()
    sync.close()
    return alike


def test_averages_are_of_the_shared_model(two: Ranks) -> None:
    assert two.run(seen_by_averages, "nothing") == [(True, True, True)] * 2
    loop, _, seen = two.run(seen_by_averages, "a step takes over")[0]
    assert not (loop and seen)
    assert not two.run(seen_by_averages, "users' hooks come first")[0][1]


def test_a_forward_for_another_networks_loss_leaves_the_shared_model(two: Ranks) -> None:
    assert two.run(gan, "nothing") == [(True, True)] * 2
    assert two.run(gan, "a step leaves its model") != [(True, True)] * 2


def test_casts_of_one_model_are_not_used_for_the_other(two: Ranks) -> None:
    assert two.run(cached_casts, "nothing") == [True, True]
    assert two.run(cached_casts, "casts are kept") == [False, False]


def test_a_second_backward_finds_what_its_forward_had(two: Ranks) -> None:
    for apart, alike in two.run(gradient_penalty, "nothing"):
        assert apart < 1e-4
        assert alike


def test_a_forward_on_one_rank_alone_harms_nobody(two: Ranks) -> None:
    assert two.run(forward_alone, "nothing") == [True, True]


# -- what users write ---------------------------------------------------------------------------------------


def clamped(rank: int, undo: str, dtype: torch.dtype, through_data: bool) -> float:
    """The largest weight one step after weights were clipped, as a WGAN's critic clips them."""
    with undone(undo):
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


def written_without_change(rank: int, undo: str) -> float:
    """How much a write that changes nothing changes the shared model, which is wider than the parameters."""
    with undone(undo):
        draw, net = noise(rank), DistributedDataParallel(network(torch.bfloat16))
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
        sync = gradsieve.attach(net, optimizer, bits=0.75)
        for _ in range(5):
            step(net, optimizer, draw().bfloat16())
        before = [local.shared.clone() for local in sync.pipeline.local]
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.clamp_(-10, 10)
        sync.replica.views.show_own()
        sync.replica.views.show_shared()
        change = max(
            float((a.shared - b).abs().max()) for a, b in zip(sync.pipeline.local, before, strict=True)
        )
        sync.close()
        return change


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_user_wrote_is_there(two: Ranks, dtype: torch.dtype, through_data: bool) -> None:
    for largest in two.run(clamped, "nothing", dtype, through_data):
        assert largest < 0.03
    if through_data and dtype == torch.bfloat16:
        for largest in two.run(clamped, "writing is seen by version", dtype, through_data):
            assert largest > 0.05


def test_a_write_that_changes_nothing_rounds_nothing(two: Ranks) -> None:
    assert two.run(written_without_change, "nothing") == [0.0, 0.0]


def parameter_of_two(rank: int, undo: str) -> str:
    with undone(undo):
        layer = nn.Linear(8, 8)
        one, other = (DistributedDataParallel(nn.Sequential(layer, nn.Linear(8, 4))) for _ in range(2))
        optimizer = torch.optim.SGD([*one.parameters(), *other.module[1].parameters()], lr=0.1)
        first = gradsieve.attach(one, optimizer, bits=0.75)
        try:
            gradsieve.attach(other, optimizer, bits=0.75).close()
        except ConfigError as error:
            return str(error)
        finally:
            first.close()
        return ""


def test_a_parameter_has_one_owner(two: Ranks) -> None:
    for said in two.run(parameter_of_two, "nothing"):
        assert "0.weight, 0.bias belongs to another model to which a sync is attached" in said
    assert two.run(parameter_of_two, "a parameter may have two owners") == ["", ""]


def odd_gradients(rank: int, undo: str) -> bool:
    """Expanded, and transposed."""
    draw, net = noise(rank), DistributedDataParallel(network())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sync = gradsieve.attach(net, optimizer, bits=0.75)
    for _ in range(4):
        step(net, optimizer, draw())
        for parameter in net.parameters():
            parameter.grad = torch.tensor(0.01).expand_as(parameter)
        optimizer.step()
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter.t()).t() if parameter.ndim == 2 else None
        optimizer.step()
    sync.flush()
    alike = same(net.parameters())
    sync.close()
    return alike


def test_gradients_of_any_shape_in_memory_are_served(two: Ranks) -> None:
    assert two.run(odd_gradients, "nothing") == [True, True]


def gradient_in_evaluation_mode(rank: int, undo: str) -> tuple[bool, bool]:
    draw, net = noise(rank), DistributedDataParallel(network())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    sync = gradsieve.attach(net, optimizer, bits=0.75)
    fixed = torch.ones(2, WIDE)
    for _ in range(3):
        step(net, optimizer, draw())
    net.eval()
    net(fixed).square().mean().backward()
    optimizer.zero_grad()
    net.train()
    for _ in range(3):
        step(net, optimizer, draw())
    net.eval()
    alike = same([net(fixed)]), same(net.parameters())
    net.train()
    sync.close()
    return alike


def test_one_backward_in_evaluation_mode_makes_no_training_of_evaluations(two: Ranks) -> None:
    assert two.run(gradient_in_evaluation_mode, "nothing") == [(True, True)] * 2


def graphs_that_are_left(rank: int, undo: str) -> list[bool]:
    """Whether a graph that outlives the exchange's backward has the gradient of the model with which it was
    recorded: one that was kept, and one of a second forward."""
    alike = []
    with undone(undo):
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


@pytest.mark.parametrize("undo", ["nothing", "graphs are reached once", "no graph waits"])
def test_graphs_that_are_left_have_the_model_they_were_recorded_with(two: Ranks, undo: str) -> None:
    for kept, of_a_second_forward in two.run(graphs_that_are_left, undo):
        assert kept == (undo == "nothing")
        assert of_a_second_forward == (undo != "no graph waits")


def test_a_rank_that_fails_is_named(two: Ranks) -> None:
    """Twin of all above: a scenario that is wrong on one rank fails the call."""
    with pytest.raises(RankFailure):
        two.run(wrong_on_one_rank, "nothing")


def wrong_on_one_rank(rank: int, undo: str) -> None:
    assert rank == 0, "on purpose"
