"""What a budget buys, and how one is found."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from gradsieve.comm.links import Links
from gradsieve.errors import ConfigError
from gradsieve.pipeline import StepPipeline
from gradsieve.pipeline.budget import KEEP, LATE, LEAST, LOOK, Adaptive, Fixed, Times, cost, spend
from gradsieve.pipeline.exchange_settings import Gradients, Steps, choose_scheme
from gradsieve.schemes.agreed import Values
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
    """A step of 100 ms of which 80 hide what is sent; sending takes so many milliseconds a bit, in addition
    to its rounds, and computing makes the step itself longer. Steps vary by chance."""

    def __init__(
        self,
        send: float,
        compute: float = 0.0,
        rounds: float = 0.0,
        skew: float = 0.0,
        noise: float = 0.0,
        seed: int = 1,
    ) -> None:
        self.send, self.compute, self.rounds, self.skew, self.noise = send, compute, rounds, skew, noise
        self.step = 100.0
        self._chance = random.Random(seed)
        self._on_their_way = [Times()] * LATE

    def run(self, budget: Adaptive, exchanges: int) -> Adaptive:
        for _ in range(exchanges):
            every = budget.every
            bits = budget.bits * every
            step = (self.step + self.compute * bits) * self._chance.gauss(1.0, self.noise)
            slack = every * step - 20.0
            waited = self.skew + max(0.0, self.rounds + self.send * bits - slack - self.skew)
            seconds = (every * step + waited, slack, waited)
            self._on_their_way.append(Times(*(each / 1e3 for each in seconds)))
            budget = budget.after(self._on_their_way.pop(0))
            assert isinstance(budget, Adaptive)
        return budget


def over(rounds: float = 0.0) -> Adaptive:
    """As with links on which the rounds of an exchange take so many milliseconds."""
    return Adaptive.over(LINKS, 25_000_000, 4, rounds=rounds / 1e3)


def found(machine: Machine, exchanges: int = 300) -> float:
    return machine.run(over(), exchanges).target


def test_a_slow_link_is_filled_and_not_more() -> None:
    """80 ms at 40 ms a bit: two bits, and what a step may be longer by."""
    assert 1.75 < found(Machine(send=40.0)) < 2.15


def test_ten_times_the_rate_gives_ten_times_the_bits() -> None:
    slow, fast = found(Machine(send=400.0)), found(Machine(send=40.0))
    assert 7 < fast / slow < 13


def test_a_link_without_end_carries_everything_as_it_is() -> None:
    assert found(Machine(send=0.1), exchanges=150) == cost("exact", 4)


def test_a_step_that_computes_longer_bounds_it_too() -> None:
    """5 ms of 100 at 2 ms a bit."""
    assert 2.0 < found(Machine(send=0.1, compute=2.0)) < 2.6


def test_what_a_thread_that_waits_computes_does_not_bound_it() -> None:
    """Nor is anybody asked for it: times are of steps alone."""
    assert Times._fields == ("step", "slack", "waited")


def by_chance(noise: float, send: float) -> list[float]:
    """What 20 runs found, sorted."""
    return sorted(found(Machine(send=send, noise=noise, seed=seed), 400) for seed in range(20))


def test_noise_hides_neither_a_full_link_nor_an_empty_one() -> None:
    full, empty = by_chance(0.05, 40.0), by_chance(0.05, 0.1)
    assert 1.4 < full[2] <= full[-3] < 2.4
    assert empty[5] > 16.0


def test_a_machine_that_is_slow_for_a_while_is_no_reason_to_send_less() -> None:
    """Half as fast for 5 exchanges in 17: neighbours are slow together."""
    machine, budget, ceilings = Machine(send=40.0), over(), []
    for number in range(300):
        machine.step = 200.0 if number % 17 < 5 else 100.0
        budget = machine.run(budget, 1)
        ceilings.append(budget.ceiling)
    assert budget.target > 1.7
    assert min(ceilings) > 1.7, "what hides was never taken for what does not"


def test_a_link_that_carries_nothing_still_carries_the_least() -> None:
    assert found(Machine(send=1e5)) == LEAST


def test_a_busier_link_is_given_less_at_once_and_a_free_one_more_later() -> None:
    budget = Machine(send=40.0).run(over(), 200)
    busy = Machine(send=160.0).run(budget, 120)
    free = Machine(send=40.0).run(busy, KEEP + 150)
    assert budget.phase == "keep"
    assert busy.target < 0.4 * budget.target
    assert free.target > 0.8 * budget.target


def test_waiting_for_a_slow_rank_is_not_the_budgets_fault() -> None:
    budget = Machine(send=40.0, skew=20.0).run(over(rounds=1.0), 300)
    assert budget.every == 1
    assert budget.target > 1.9


@pytest.mark.parametrize("rounds", [100.0, 330.0, 2000.0])
def test_a_period_is_as_long_as_rounds_take_and_no_longer(rounds: float) -> None:
    budget = Machine(send=40.0, rounds=rounds).run(over(rounds), 300)
    hides = (rounds + 20.0) / 100.0
    assert hides <= budget.every <= hides + 2
    assert budget.target > LEAST


def test_a_period_that_the_user_chose_stays() -> None:
    assert Machine(send=40.0, rounds=330.0).run(over(), 200).every == 1


def test_next_to_nothing_is_sent_between_two_tries_and_in_no_exchange_of_a_budget_that_is_kept() -> None:
    budget, sent = over(), []
    machine = Machine(send=40.0)
    for _ in range(200):
        budget = machine.run(budget, 1)
        sent.append((budget.phase, budget.bits == LEAST))
    tries = [least for phase, least in sent if phase == "try"]
    assert 0.4 < sum(tries) / len(tries) < 0.6
    assert not any(least for phase, least in sent if phase == "keep")
    assert sent[-1][0] == "keep"


def test_a_resumed_run_looks_first_and_goes_on_from_where_it_was() -> None:
    budget = over().at(1.5)
    assert budget.phase == "look"
    assert Machine(send=40.0).run(budget, LOOK + LATE).target == 1.5
    assert Fixed(0.5).at(0.7) == Fixed(0.5)


def test_a_run_that_kept_the_least_finds_more_when_it_is_resumed_on_a_better_link() -> None:
    kept = Machine(send=1e5).run(over(), 300)
    assert kept.target == LEAST
    assert Machine(send=40.0).run(over().at(kept.target), 300).target > 1.7


def test_what_is_said_when_a_budget_was_found_has_bits_age_and_noise() -> None:
    kept = replace(over(), phase="keep", bits=0.4, target=0.4, longer=0.02, noise=0.004)
    said = kept.says(4)
    assert "0.4 bits a parameter" in said
    assert "sign" in said
    assert "4 steps" in said
    assert "2.0% (+- 0.4%) longer" in said
    assert "every 3 steps" in replace(kept, every=3).says(4)


def test_nothing_is_said_before_or_later_or_of_a_fixed_budget() -> None:
    kept = replace(over(), phase="keep", bits=0.4, target=0.4)
    assert kept.says(4)
    assert not kept.after(Times(0.1, 0.08)).says(4)
    assert not over().says(4)
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


def test_a_density_alone_is_exdynas() -> None:
    assert choose_scheme(None, 0.02, None, None) == ExDyna(density=0.02)


@pytest.mark.parametrize("given", [("exdyna", None), (None, 0.1)])
def test_a_budget_beside_a_scheme_or_a_density_is_refused(given: tuple[str | None, float | None]) -> None:
    with pytest.raises(ConfigError, match="bits="):
        choose_scheme(*given, 0.5, None)
