"""What a budget buys, and how one is found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gradsieve.comm.links import Links
from gradsieve.errors import ConfigError
from gradsieve.pipeline import StepPipeline
from gradsieve.pipeline.budget import EPOCH, LEAST, LOOK_AGAIN, Adaptive, Fixed, Times, cost, spend
from gradsieve.pipeline.exchange_settings import Gradients, Steps, choose_scheme
from gradsieve.schemes.exdyna import ExDyna
from gradsieve.schemes.stripes import Stripes

LINKS = Links(latency=1e-4, word=4e-9)  # a word of four bytes at 8 Gbit/s


@pytest.mark.parametrize("world", [2, 3, 4, 16, 64])
@pytest.mark.parametrize("bits", [0.05, 0.15, 0.75, 1.5, 3.0, 6.0, 20.0, 64.0])
def test_a_budget_is_kept(bits: float, world: int) -> None:
    values, share = spend(bits, world)
    assert 0 < share <= 1
    assert share * cost(values, world) <= bits * 1.0001


def test_more_bits_tell_more_first_by_longer_stretches_then_by_wider_codes() -> None:
    bought = [spend(bits, 4) for bits in (0.1, 0.4, 1.5, 3.1, 6.2, 25.0, 48.0)]
    assert [values for values, _ in bought] == ["sign", "sign", "sign", "int2", "int4", "bf16", "exact"]
    shares = [share for values, share in bought if values == "sign"]
    assert shares == sorted(shares)


def test_a_rank_alone_sends_nothing_and_rounds_nothing() -> None:
    assert spend(0.1, 1) == ("exact", 1.0)


@pytest.mark.parametrize("bits", [0.0, -1.0, float("nan")])
def test_no_budget_is_refused(bits: float) -> None:
    with pytest.raises(ConfigError, match="bits are a budget"):
        Fixed(bits)


class Machine:
    """A step of 100 ms of which 80 are room; sending takes so many milliseconds a bit, computing too, beside
    those that it takes whatever is sent."""

    def __init__(self, send: float, compute: float = 0.1, always: float = 0.0) -> None:
        self.send, self.compute, self.always = send, compute, always

    def run(self, budget: Adaptive, epochs: int) -> Adaptive:
        for _ in range(EPOCH * epochs):
            waited = max(0.0, self.send * budget.bits - 80.0)
            seconds = (100.0 + waited, 80.0, waited, self.always + self.compute * budget.bits)
            budget = budget.after(Times(*(each / 1e3 for each in seconds)))
            assert isinstance(budget, Adaptive)
        return budget


def found(machine: Machine, epochs: int = 30) -> float:
    return machine.run(Adaptive.over(LINKS, 25_000_000, 4), epochs).bits


def test_a_slow_link_is_filled_and_not_more() -> None:
    """80 ms of room at 40 ms a bit: two bits, and what may be waited for."""
    assert 1.5 < found(Machine(send=40.0)) < 2.5


def test_ten_times_the_rate_gives_ten_times_the_bits() -> None:
    slow, fast = found(Machine(send=400.0)), found(Machine(send=40.0))
    assert 7 < fast / slow < 13


def test_a_link_without_end_carries_everything_as_it_is() -> None:
    assert found(Machine(send=0.1, compute=0.01)) == cost("exact", 4)


def test_what_computing_costs_bounds_it_too() -> None:
    """1.5 ms of 100 at 2 ms a bit."""
    assert 0.6 < found(Machine(send=0.1, compute=2.0)) < 1.0


def test_what_is_computed_whatever_is_sent_does_not() -> None:
    assert 0.6 < found(Machine(send=0.1, compute=2.0, always=7.0)) < 1.0


def test_a_link_that_carries_nothing_still_carries_the_least() -> None:
    assert found(Machine(send=1e5)) < 2 * LEAST


def test_a_busier_link_is_given_less_and_a_free_one_more() -> None:
    budget = Machine(send=40.0).run(Adaptive.over(LINKS, 25_000_000, 4), 30)
    busy = Machine(send=160.0).run(budget, 30)
    free = Machine(send=40.0).run(busy, 2 * LOOK_AGAIN)
    assert busy.bits < 0.4 * budget.bits
    assert free.bits > 0.6 * budget.bits


def test_waiting_for_a_slow_rank_is_not_the_budgets_fault() -> None:
    class Straggling(Machine):
        def run(self, budget: Adaptive, epochs: int) -> Adaptive:
            for _ in range(EPOCH * epochs):
                late = 20.0 + max(0.0, self.send * budget.bits - 100.0)
                seconds = (100.0 + late, 80.0, late, 0.0)
                budget = budget.after(Times(*(each / 1e3 for each in seconds)))
            return budget

    assert found(Straggling(send=40.0)) > 2.0


def test_it_looks_again_from_time_to_time() -> None:
    budget = Machine(send=40.0).run(Adaptive.over(LINKS, 25_000_000, 4), 1 + LOOK_AGAIN)
    assert budget.looking
    assert budget.bits == LEAST
    assert Machine(send=40.0).run(budget, 1).bits == pytest.approx(budget.found)


def test_a_resumed_run_looks_first_and_goes_on_from_where_it_was() -> None:
    budget = Adaptive.over(LINKS, 25_000_000, 4).at(1.5)
    assert budget.looking
    assert Machine(send=40.0).run(budget, 1).bits == 1.5
    assert Fixed(0.5).at(0.7) == Fixed(0.5)


def test_what_is_said_tells_bits_and_age() -> None:
    looked = Machine(send=1e3).run(Adaptive.over(LINKS, 1000, 4), 1)
    said = replace(looked, bits=0.4).says(4)
    assert "0.4 bits a parameter" in said
    assert "sign" in said
    assert "4 steps" in said


def test_nothing_is_said_in_the_middle_of_an_epoch_or_of_a_fixed_budget() -> None:
    looked = Machine(send=1e3).run(Adaptive.over(LINKS, 1000, 4), 1)
    assert looked.says(4)
    assert not looked.after(Times(0.1, 0.08)).says(4)
    assert not Fixed(0.5).says(4)


def test_what_a_treatment_says_of_single_steps_goes_for_a_budget_too() -> None:
    """Everything as it is in the first step and in every fourth; otherwise what the budget buys."""
    model = {"p": torch.zeros(1000)}
    pipeline = StepPipeline(model.items(), Stripes(), 0, 4, settings=Steps(refresh=4, warm_up=1))
    pipeline.budget = Fixed(0.5)
    whole = []
    for pipeline.step in range(8):
        whole.append(pipeline.scheme_of_this_step().is_whole)
    assert whole == [True, False, False, True, False, False, False, True]
    assert pipeline.scheme.density == Stripes().density


# -- which scheme a run gets ----------------------------------------------------------------------------


def test_who_asks_for_nothing_gets_stripes_and_a_budget() -> None:
    assert choose_scheme(None, None, None, None) == Stripes()
    assert choose_scheme(None, None, 0.5, None) == Stripes()


def test_gradients_are_exchanged_by_exdyna() -> None:
    assert choose_scheme(None, None, None, Gradients()) == ExDyna()


def test_gradients_have_no_budget() -> None:
    with pytest.raises(ConfigError, match=r"bits= is for gradsieve\.Steps"):
        choose_scheme(None, None, 0.5, Gradients())


def test_a_density_alone_is_exdynas() -> None:
    assert choose_scheme(None, 0.02, None, None) == ExDyna(density=0.02)


@pytest.mark.parametrize("given", [("exdyna", None), (None, 0.1)])
def test_a_budget_beside_a_scheme_or_a_density_is_refused(given: tuple[str | None, float | None]) -> None:
    with pytest.raises(ConfigError, match="bits="):
        choose_scheme(*given, 0.5, None)
