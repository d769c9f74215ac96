"""What a budget buys, and how one is chosen: once, by the seconds of the first exchanges."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from gradsieve.comm import lockstep
from gradsieve.errors import ConfigError, Malformed
from gradsieve.pipeline import StepPipeline
from gradsieve.pipeline.budget import ALL, LEAST, LITTLE, Budget, Timed, Timer, choose, needed
from gradsieve.pipeline.exchange_settings import Gradients, Steps, choose_scheme
from gradsieve.schemes.base import Values
from gradsieve.schemes.exdyna import ExDyna
from gradsieve.schemes.stripes import Stripes, cost

CPU = torch.device("cpu")


@pytest.mark.parametrize("world", [2, 3, 4, 16, 64])
@pytest.mark.parametrize("bits", [0.05, 0.15, 0.75, 1.5, 3.0, 6.0, 20.0, 64.0])
def test_a_budget_is_kept(bits: float, world: int) -> None:
    bought = Stripes().at_bits(bits, world)
    assert 0 < bought.density <= 1
    assert bought.density * cost(bought.values, world) <= bits * 1.0001


def test_more_bits_tell_more_first_by_longer_stretches_then_by_wider_codes() -> None:
    bought = [Stripes().at_bits(bits, 4) for bits in (0.1, 0.4, 1.5, 3.1, 6.2, 25.0, 48.0)]
    assert [each.values for each in bought] == ["sign", "sign", "sign", "int2", "int4", "bf16", "exact"]
    shares = [each.density for each in bought if each.values == "sign"]
    assert shares == sorted(shares)


def test_who_has_a_density_has_no_budget() -> None:
    with pytest.raises(ConfigError, match="ExDyna has a density"):
        ExDyna().at_bits(1.0, 4, [(10,)])


@pytest.mark.parametrize("bits", [0.0, -1.0, float("nan")])
def test_no_budget_is_refused(bits: float) -> None:
    with pytest.raises(ConfigError, match="bits are a budget"):
        Budget(bits)


# -- what quality needs, and what a step carries --------------------------------------------------------


def test_more_ranks_need_more_bits() -> None:
    worlds = {2: 0.75, 3: 0.75, 4: 0.75, 5: 2.0, 8: 2.0, 9: 4.0, 16: 4.0, 17: 8.0, 64: 8.0, 1024: 8.0}
    assert {world: needed(world) for world in worlds} == worlds


def seen(
    bits: float, a_bit: float, rounds: float = 0.0, computed: float = 0.0, every: int = 1, skew: float = 0.0
) -> Timed:
    """A step of 100 ms of which 80 hide an exchange, which takes so many milliseconds and for each bit.
    Where ranks compute, too, the step is longer by as much; `skew` is waited for a slow rank."""
    step = 100.0 + computed * bits
    exchange, slack = rounds + a_bit * every * bits, every * step - 20.0
    period = every * step + max(0.0, exchange - slack) + skew
    return Timed(bits, period / 1e3, exchange / 1e3, slack / 1e3)


def chosen(a_bit: float, world: int = 4, every: int = 1, may_wait: bool = True, **machine: float) -> Budget:
    timed = [seen(bits, a_bit, every=every, **machine) for bits in (LEAST, needed(world))]
    return choose(world, timed, every, may_wait)


@pytest.mark.parametrize("world", [2, 4, 8, 16, 64])
def test_where_a_step_carries_what_is_needed_that_is_sent_and_not_more(world: int) -> None:
    assert chosen(80.0 / needed(world), world) == Budget(needed(world))
    assert chosen(0.0, world) == Budget(needed(world))


@pytest.mark.parametrize("world", [8, 16, 64])
def test_what_a_link_does_not_carry_is_not_sent(world: int) -> None:
    """80 ms at 80 ms a bit."""
    found = chosen(80.0, world)
    assert found.every == 1
    assert 0.7 <= found.bits < needed(world)


def test_a_few_more_milliseconds_are_worth_the_bits_and_many_are_not() -> None:
    """With a fifth of the bits there are 11 % more steps."""
    assert chosen(110.0).bits == 0.75
    assert chosen(200.0).bits < 0.6
    assert chosen(1000.0).bits == LEAST


@pytest.mark.parametrize("rounds", [300.0, 1000.0, 4000.0])
def test_where_no_budget_fits_a_step_a_period_does(rounds: float) -> None:
    found = chosen(10.0, rounds=rounds)
    assert 0.7 * rounds / 100 <= found.every <= 2 * rounds / 100
    assert found.bits >= LEAST
    assert chosen(10.0, rounds=rounds, may_wait=False).every == 1


def test_waiting_for_a_slow_rank_is_no_reason_for_a_period() -> None:
    assert chosen(10.0, skew=60.0) == Budget(0.75)


def test_a_period_that_the_user_chose_stays() -> None:
    found = chosen(200.0, every=3, may_wait=False)
    assert found.every == 3
    assert found.bits < 0.75


# -- the first exchanges --------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    now = {"s": 100.0}
    monkeypatch.setattr(time, "perf_counter", lambda: now["s"])
    return now


def trained(clock: dict[str, float], exchange: Callable[[float], float], pause: int = -1) -> list[Timer]:
    """Two ranks, the second of which comes 50 ms later into every exchange. `exchange`: its seconds, by bits;
    the first is slow, and before one of them somebody evaluated the model."""
    timers = [Timer(2, 1, True, CPU) for _ in range(2)]
    for number in range(ALL):
        begun = clock["s"]
        took = exchange(timers[0].budget.bits) + (9.0 if number == 0 else 0.0)
        for timer, late in zip(timers, (0.0, 0.05), strict=True):
            assert timer.budget.bits == (LEAST if number < LITTLE else needed(2))
            assert not timer.budget.is_chosen
            clock["s"] = begun + late
            timer.mark("begun")
            clock["s"] = begun + 0.05 + took
            timer.mark("got")
        if timers[0].is_last:
            lockstep.run([timer.gather() for timer in timers])
        clock["s"] = begun + 0.15 + max(0.0, took - 0.08) + (60.0 if number == pause else 0.0)
        after = [timer.after() for timer in timers]
        assert after[0] == after[1]
        end = clock["s"]
        for timer, late in zip(timers, (0.0, 0.05), strict=True):  # it was applied before it was needed
            clock["s"] = begun + late + 0.08
            timer.mark("needed")
        clock["s"] = end
    return timers


@pytest.mark.parametrize("pause", [-1, 2, 5])
def test_all_ranks_choose_by_the_one_that_waits_for_none(clock: dict[str, float], pause: int) -> None:
    timers = trained(clock, lambda bits: 0.1 * bits, pause)
    assert [timer.budget for timer in timers] == [Budget(0.75)] * 2


def test_a_link_that_takes_longer_leads_to_fewer_bits(clock: dict[str, float]) -> None:
    """The twin: it is the seconds that decide."""
    timers = trained(clock, lambda bits: 2.0 * bits)
    assert timers[0].budget == timers[1].budget
    assert timers[0].budget.is_chosen
    assert timers[0].budget.bits < 0.75


def test_after_the_choice_no_clock_is_looked_at(clock: dict[str, float]) -> None:
    timer = trained(clock, lambda bits: 0.1 * bits)[0]
    before = timer.budget
    for _ in range(50):
        timer.mark("begun")
        clock["s"] += 1e3
        timer.mark("got")
        assert timer.after() == before
    assert not timer.is_last


def test_a_choice_that_was_kept_is_not_timed_again() -> None:
    timer = Timer(4, 1, True, CPU)
    assert timer.restart(Budget(0.27, 3)) == Budget(0.27, 3)
    assert not timer.is_last
    assert timer.after() == Budget(0.27, 3)
    assert timer.restart() == Budget(LEAST, is_chosen=False), "the twin"


def test_seconds_that_no_clock_shows_are_refused(clock: dict[str, float]) -> None:
    with pytest.raises(Malformed, match="no clock shows"):
        trained(clock, lambda bits: 1e9)


def pipeline_of(world: int, rank: int = 0) -> StepPipeline:
    model = {"w": torch.zeros(5000)}
    return StepPipeline(model, (), Stripes(), Steps(), rank, world)


def test_a_checkpoint_keeps_the_choice_and_one_from_before_it_has_none() -> None:
    first, later = pipeline_of(4), pipeline_of(4)
    first.choose_budget(None, is_chosen=True, may_wait=True)
    later.choose_budget(None, is_chosen=True, may_wait=True)
    assert (first.figures()["budget"], first.figures()["every"]) == (0.0, 0.0)
    later.set_figures(first.figures())
    assert later.budget == Budget(LEAST, is_chosen=False)
    first.follow(Budget(0.38, 2))
    later.set_figures(first.figures())
    assert later.budget == Budget(0.38, 2)
    assert (later.settings.every, later.settings.overlap) == (2, 2)
    fixed = pipeline_of(4)
    fixed.budget = Budget(1.5)
    fixed.set_figures(first.figures())
    assert fixed.budget == Budget(1.5), "who gave bits= keeps them"


def test_what_is_chosen_is_logged_with_the_line_that_repeats_it(caplog: pytest.LogCaptureFixture) -> None:
    few, many = pipeline_of(4), pipeline_of(64)
    with caplog.at_level("INFO", "gradsieve"):
        for pipeline in (few, many, pipeline_of(4, rank=1)):
            pipeline.choose_budget(None, is_chosen=True, may_wait=True)
            pipeline.follow(Budget(0.38, 2))
            pipeline.follow(Budget(0.38, 2))
    line = "step 0: from here on bits=0.38, exchange=gradsieve.Steps(every=2, overlap=2)"
    assert caplog.messages[:2] == [line, line]
    assert "up to 16 ranks, not with 64" in caplog.messages[2]
    assert len(caplog.messages) == 3


# -- which scheme a run gets ----------------------------------------------------------------------------


def test_who_asks_for_nothing_gets_stripes_and_a_budget() -> None:
    assert choose_scheme(None, None, None, None) == Stripes()
    assert choose_scheme(None, None, 0.5, None) == Stripes()


@pytest.mark.parametrize(
    ("bits", "values"),
    [(8, "int4"), (15.9, "int4"), (16, "int8"), (32, "bf16"), (64, "exact"), (99, "exact")],
)
def test_a_budget_buys_all_gradients_in_as_many_bits_as_it_has(bits: float, values: Values) -> None:
    assert choose_scheme(None, None, bits, Gradients()) == Stripes(density=1.0, values=values)


@pytest.mark.parametrize("bits", [0.5, 7.9])
def test_gradients_are_not_sent_in_fewer_than_four_bits(bits: float) -> None:
    with pytest.raises(ConfigError, match=f"bits={bits:g} with gradsieve.Gradients: gradients need 8"):
        choose_scheme(None, None, bits, Gradients())


@pytest.mark.parametrize("given", [("exdyna", None), (None, 0.1)])
def test_a_budget_beside_a_scheme_or_a_density_is_refused(given: tuple[str | None, float | None]) -> None:
    with pytest.raises(ConfigError, match="bits="):
        choose_scheme(*given, 0.5, None)
