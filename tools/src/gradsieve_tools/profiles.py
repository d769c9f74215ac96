"""A profile: what a group's network and hosts were measured to do, as a TOML file with units.

`gradsieve doctor --profile FILE` writes it; a prediction reads it, with checks. A person may write one
too, for a cluster that is not rented yet: tables [made], [ring] and [pairs] may be missing, and [model] if
there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from gradsieve.comm.links import Links
from gradsieve.errors import ConfigError
from gradsieve_tools.devices import DEVICES, MESSAGE
from gradsieve_tools.documents import Table, open_document
from gradsieve_tools.quantities import BITS, BYTES_A_SECOND, ELEMENTS_A_SECOND, SECONDS, Units, parse, write

VERSION = 1
MOST_WORLD, MOST_PAIRS = 65_536, 64  # ranks, and ranks up to which every pair is listed
_MOST_PARAMETERS = 10**13
Rows: TypeAlias = tuple[tuple[float | None, ...], ...]  # row sends, column receives; None: not measured


@dataclass(frozen=True, slots=True)
class Pairs:
    latency: Rows  # seconds
    bandwidth: Rows  # bit/s


@dataclass(frozen=True, slots=True)
class ModelProfile:
    parameters: int
    units: int  # units of exchange, as `attach` makes them by default
    forward: float | None = None  # seconds, of the slowest rank; None where it was not measured
    backward: float | None = None


@dataclass(frozen=True, slots=True)
class Profile:
    world: int
    hosts: int
    latency: float  # seconds that a round takes however short its messages, as in `Links`; the median pair
    bandwidth: float  # bit/s one way; the median pair
    message: float  # seconds of processor time for a word sent and one received
    slowest_latency: float
    slowest_bandwidth: float
    memory: float  # bytes a second that a copy reads and writes; the slowest rank, as all that follows
    selection: float  # elements a second that are looked at to select one in a thousand
    launch: float = 0.0  # seconds of a kernel launch; 0 where ranks compute on a CPU
    # A sum over all ranks by gloo: seconds however short, and for one more word that each rank sends to the
    # next; None where it was not measured
    ring: Links | None = None
    pairs: Pairs | None = None  # pairs of different ranks; None: too many
    model: ModelProfile | None = None
    made: Mapping[str, str] = field(default_factory=dict)  # date, command, versions

    @property
    def links(self) -> Links:
        return Links.at(self.latency, self.bandwidth)

    @property
    def slowest_links(self) -> Links:
        """Return what a ring waits for."""
        return Links.at(self.slowest_latency, self.slowest_bandwidth)


def by_hand(device: str, world: int, rate: float, latency: float) -> Profile:
    """Return a profile from the table of devices, on links that are all alike."""
    links = Profile(world, world, latency, rate, MESSAGE, latency, rate, memory=1.0, selection=1.0)
    return computing_on(device, links)


def computing_on(device: str, profile: Profile) -> Profile:
    """Replace the hosts' figures by a device's. The ring was gloo's, which devices do not use."""
    each = DEVICES[device]
    return replace(profile, memory=each.memory, selection=each.selection, launch=each.launch, ring=None)


def read(path: Path) -> Profile:
    """Read a profile, or refuse what is none, with its line."""
    table = open_document(path)
    table.need("version")
    version = table.whole("version", 1, 2**31)
    if version > VERSION:
        raise table.error(
            f"version {version} is of a later gradsieve; this one reads up to {VERSION}", "version"
        )
    table.allow("version", "made", "group", "links", "slowest", "host", "ring", "model", "pairs")
    group, links, slowest = (_only(table.table(name), *_KEYS[name]) for name in _KEYS)
    host = table.table("host")
    host.allow("memory", "selection", "launch")
    host.need("memory", "selection")
    world = group.whole("world", 2, MOST_WORLD)
    made = table.table("made") if "made" in table.values else None
    return Profile(
        world=world,
        hosts=group.whole("hosts", 1, world),
        latency=_seconds(links, "latency"),
        bandwidth=_amount(links, "bandwidth", BITS),
        message=_seconds(links, "message"),
        slowest_latency=_seconds(slowest, "latency"),
        slowest_bandwidth=_amount(slowest, "bandwidth", BITS),
        memory=_amount(host, "memory", BYTES_A_SECOND),
        selection=_amount(host, "selection", ELEMENTS_A_SECOND),
        launch=_seconds(host, "launch") if "launch" in host.values else 0.0,
        ring=_ring(table.table("ring")) if "ring" in table.values else None,
        pairs=_pairs(table.table("pairs"), world) if "pairs" in table.values else None,
        model=_model(table.table("model")) if "model" in table.values else None,
        made={} if made is None else {key: made.text(key) for key in made.values},
    )


def write_profile(path: Path, profile: Profile) -> None:
    path.write_text(text_of(profile))


def text_of(profile: Profile) -> str:
    lines = [f"version = {VERSION}"]

    def table(name: str, comment: str, entries: Mapping[str, str]) -> None:
        lines.extend(["", f"[{name}]{comment and f'  # {comment}'}"])
        lines.extend(f"{key} = {value}" for key, value in entries.items())

    if profile.made:
        table("made", "", {key: _quoted(value) for key, value in profile.made.items()})
    table("group", "", {"world": str(profile.world), "hosts": str(profile.hosts)})
    table(
        "links",
        "the median pair; message: processor time for a word sent and one received",
        _link_entries(profile.latency, profile.bandwidth) | {"message": _quantity(profile.message, SECONDS)},
    )
    slowest = _link_entries(profile.slowest_latency, profile.slowest_bandwidth)
    table("slowest", "of all pairs, each figure by itself", slowest)
    host = {
        "memory": _quantity(profile.memory, BYTES_A_SECOND),
        "selection": _quantity(profile.selection, ELEMENTS_A_SECOND),
    }
    if profile.launch:
        host["launch"] = _quantity(profile.launch, SECONDS)
    table("host", "the slowest rank, while all others worked too; selection: elements looked at", host)
    if profile.ring is not None:
        ring = _link_entries(profile.ring.latency, profile.ring.bandwidth)
        table("ring", "a sum by gloo: however short, and from each rank to the next", ring)
    if profile.model is not None:
        table("model", "the slowest rank", _model_entries(profile.model))
    if profile.pairs is not None:
        rows = {
            "latency_us": _rows_text(profile.pairs.latency, 1e6),
            "bandwidth_mbit": _rows_text(profile.pairs.bandwidth, 1e-6),
        }
        table("pairs", "row sends, column receives; 0: not measured", rows)
    return "\n".join(lines) + "\n"


_KEYS = {
    "group": ("world", "hosts"),
    "links": ("latency", "bandwidth", "message"),
    "slowest": ("latency", "bandwidth"),
}


def _only(table: Table, *keys: str) -> Table:
    table.allow(*keys)
    table.need(*keys)
    return table


def _ring(table: Table) -> Links:
    _only(table, "latency", "bandwidth")
    return Links.at(_seconds(table, "latency"), _amount(table, "bandwidth", BITS))


def _link_entries(latency: float, bandwidth: float) -> dict[str, str]:
    return {"latency": _quantity(latency, SECONDS), "bandwidth": _quantity(bandwidth, BITS)}


def _model(table: Table) -> ModelProfile:
    table.allow("parameters", "units", "forward", "backward")
    is_timed = "forward" in table.values or "backward" in table.values
    parameters = table.whole("parameters", 1, _MOST_PARAMETERS)
    return ModelProfile(
        parameters,
        table.whole("units", 1, parameters),
        _seconds(table, "forward") if is_timed else None,
        _seconds(table, "backward") if is_timed else None,
    )


def _model_entries(model: ModelProfile) -> dict[str, str]:
    entries = {"parameters": str(model.parameters), "units": str(model.units)}
    if model.forward is not None and model.backward is not None:
        entries |= {
            "forward": _quantity(model.forward, SECONDS),
            "backward": _quantity(model.backward, SECONDS),
        }
    return entries


def _pairs(table: Table, world: int) -> Pairs:
    _only(table, "latency_us", "bandwidth_mbit")
    return Pairs(_rows(table, "latency_us", world, 1e-6), _rows(table, "bandwidth_mbit", world, 1e6))


def _rows(table: Table, key: str, world: int, factor: float) -> Rows:
    """Numbers from 0 up, as many rows and columns as ranks."""
    rows = table.values[key]
    is_square = isinstance(rows, list) and len(rows) == world <= MOST_PAIRS
    if not is_square or not all(isinstance(row, list) and len(row) == world for row in rows):
        raise table.error(f"{key} has {world} rows of {world} numbers, and at most {MOST_PAIRS}", key)
    if not all(_is_figure(value) for row in rows for value in row):
        raise table.error(f"{key} has something else than numbers from 0 to 1e12", key)
    return tuple(tuple(factor * value if value else None for value in row) for row in rows)


def _is_figure(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1e12


def _rows_text(rows: Sequence[Sequence[float | None]], factor: float) -> str:
    texts = [", ".join(f"{factor * value:.4g}" if value else "0" for value in row) for row in rows]
    return "[\n" + "".join(f"  [{text}],\n" for text in texts) + "]"


def _seconds(table: Table, key: str) -> float:
    return table.parsed(key, _reader(SECONDS, 'a time such as "120us" or "5ms"'))


def _amount(table: Table, key: str, units: Units) -> float:
    """More than nothing: something is divided by it."""
    examples = " or ".join(f'"10{unit}"' for unit in units)
    value = table.parsed(key, _reader(units, f"one such as {examples}"))
    if value <= 0:
        raise table.error(f"{key} is 0", key)
    return value


def _reader(units: Units, wanted: str) -> Callable[[str], float]:
    def read_one(text: str) -> float:
        value = parse(text, units)
        if value is None:
            raise ConfigError(f"{text!r} is not {wanted}, without a space")
        return value

    return read_one


def _quantity(value: float, units: Units) -> str:
    return f'"{write(value, units)}"'


def _quoted(text: str) -> str:
    return '"' + "".join(c if c.isprintable() and c not in '"\\' else "?" for c in text) + '"'
