"""Rates and delays: text from a person in, checked numbers out. Only the numbers ever reach `tc`."""

from gradsieve.errors import ConfigError
from gradsieve_tools.quantities import BITS, SECONDS, parse

UNSHAPED = "unshaped"
SLOWEST, FASTEST = 10_000, 100_000_000_000  # bit/s
LONGEST = 10.0  # seconds one way


def parse_rate(text: str | None) -> int | None:
    """Bits per second of "1gbit", "100mbit", "64kbit"; None for "unshaped" or no rate at all."""
    if text is None or text == UNSHAPED:
        return None
    bits = parse(text, BITS)
    if bits is None or not SLOWEST <= bits <= FASTEST:
        raise ConfigError(
            f"rate {text!r} is not a link rate: "
            f"write e.g. 100mbit, 1gbit (10kbit to 100gbit) or {UNSHAPED}, without a space"
        )
    return round(bits)


def parse_delay(text: str | None) -> float | None:
    """Seconds one way of "5ms", "250us", "1s"; None for no delay or a delay of zero."""
    if text is None:
        return None
    seconds = parse(text, SECONDS)
    if seconds is None or seconds > LONGEST:
        raise ConfigError(
            f"delay {text!r} is not a one-way delay: write e.g. 5ms, 250us (up to 10s), without a space"
        )
    return seconds or None
