"""When a unit goes dense: pure arithmetic on the seconds that all ranks know."""

from __future__ import annotations

from gradsieve.pipeline.fallback import AGAIN, WARM_UP, Fallback


def course(fallback: Fallback, sparse: float, dense: float, exchanges: int) -> tuple[Fallback, list[bool]]:
    """What is chosen where the two ways really cost that much."""
    ways = []
    for _ in range(exchanges):
        way = fallback.goes_dense
        ways.append(way)
        fallback = fallback.after(dense if way else sparse, way)
    return fallback, ways


def test_a_slow_link_never_sees_a_dense_exchange() -> None:
    _, ways = course(Fallback(dense=10.0), sparse=0.1, dense=11.0, exchanges=5 * AGAIN)
    assert not any(ways)


def test_dense_is_taken_where_it_is_faster_and_the_scheme_tried_again_at_times() -> None:
    _, ways = course(Fallback(dense=0.5), sparse=1.0, dense=0.6, exchanges=3 * AGAIN)
    assert not any(ways[: WARM_UP + 1])
    assert all(ways[WARM_UP + 2 : WARM_UP + AGAIN])
    assert 1 <= ways[WARM_UP + 2 :].count(False) <= 3


def test_where_the_scheme_is_far_behind_it_is_not_tried_again() -> None:
    _, ways = course(Fallback(dense=0.1), sparse=1.0, dense=0.2, exchanges=3 * AGAIN)
    assert all(ways[WARM_UP + 2 :])


def test_a_guess_that_promised_too_much_costs_one_dense_exchange() -> None:
    _, ways = course(Fallback(dense=0.5), sparse=1.0, dense=3.0, exchanges=3 * AGAIN)
    assert ways.count(True) == 1


def test_a_link_that_grows_slow_is_noticed() -> None:
    fallback, ways = course(Fallback(dense=0.5), sparse=1.0, dense=0.6, exchanges=50)
    assert ways[-1]
    _, ways = course(fallback, sparse=1.0, dense=9.0, exchanges=50)
    assert not ways[-1]


def test_slow_first_exchanges_decide_nothing() -> None:
    fallback = Fallback(dense=0.5)
    for _ in range(WARM_UP - 1):
        fallback = fallback.after(100.0, dense=False)
    _, ways = course(fallback, sparse=0.1, dense=0.6, exchanges=50)
    assert not any(ways)


def test_now_and_then_waiting_for_a_slow_rank_changes_nothing() -> None:
    fallback = Fallback(dense=0.5)
    for turn in range(AGAIN):
        assert not fallback.goes_dense
        fallback = fallback.after(3.0 if turn % 4 else 0.1, dense=False)
