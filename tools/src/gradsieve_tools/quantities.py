"""Numbers with units, as people write and read them: "100mbit", "5ms", "8.1GB/s", "1.3B"."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import TypeAlias

Units: TypeAlias = dict[str, float]  # what each unit is in the base unit, the smallest first

BITS: Units = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}  # a second, as `tc` writes rates
SECONDS: Units = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
BYTES_A_SECOND: Units = {"kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9}
ELEMENTS_A_SECOND: Units = {"k/s": 1e3, "M/s": 1e6, "G/s": 1e9}

# Powers of ten of thousands, millions, billions and trillions, as sizes of models are written
_COUNTS = {"k": 3, "m": 6, "b": 9, "t": 12}
_SPOKEN = {"kbit": "kbit/s", "mbit": "Mbit/s", "gbit": "Gbit/s"}
_NUMBER_AND_UNIT = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)([a-zA-Z/]{1,4})", re.ASCII)


def parse(text: str, units: Units) -> float | None:
    """Return the value in the base unit; None: no number with one of these units, without a space."""
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None or match[2] not in units:
        return None
    return float(match[1]) * units[match[2]]


def whole_number(text: str) -> int | None:
    """Parse "1000", "25e6", "124M" or "1.3B" exactly; None: no whole number, or an absurd one."""
    power = _COUNTS.get(text[-1:].lower(), 0)
    try:
        number = Decimal(text[:-1] if power else text)
    except InvalidOperation:
        return None
    if not number.is_finite() or abs(number.adjusted()) > 30:  # int() would write out all its digits
        return None
    number = number.scaleb(power)
    return int(number) if number == number.to_integral_value() else None


def write(value: float, units: Units, digits: int = 4) -> str:
    return "".join(_parts(value, units, digits))


def spoken(value: float, units: Units, digits: int = 4) -> str:
    number, unit = _parts(value, units, digits)
    return f"{number} {_SPOKEN.get(unit, unit)}"


def _parts(value: float, units: Units, digits: int) -> tuple[str, str]:
    unit = next((name for name in reversed(units) if value >= units[name]), next(iter(units)))
    number = value / units[unit]
    text = f"{number:.{max(0, digits - len(str(int(number))))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text, unit
