"""The parts of the lab that need no network: units, names, lines for `ip` and `tc`, the relay's clock."""

import argparse
import re

import pytest

from gradsieve.errors import ConfigError
from gradsieve_tools.cli import main
from gradsieve_tools.emulation import available, names, tools
from gradsieve_tools.emulation.relay import Relay
from gradsieve_tools.emulation.units import parse_rate
from gradsieve_tools.errors import LabError

ADDRESS_OFFSET = 26  # destination address: virtio header (10 bytes) + 16 bytes into the IPv4 header


# --- units


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("1gbit", 10**9),
        ("100mbit", 10**8),
        ("2.5gbit", 2_500_000_000),
        ("10kbit", 10_000),
        ("unshaped", None),
        (None, None),
    ],
)
def test_a_rate_is_read_as_bits_per_second(text: str | None, bits: int | None) -> None:
    assert parse_rate(text) == bits


@pytest.mark.parametrize(
    "text",
    ["", "1", "gbit", "1 gbit", "1gbit\n", "-1gbit", "1e9bit", "0gbit", "9kbit", "101gbit", "1gbit root"],
)
def test_what_is_not_a_rate_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"rate {text!r} is not a link rate")):
        parse_rate(text)


# --- names


@pytest.mark.parametrize("name", ["", "a" * 13, "A", "a b", "../etc", "a\n", "a;b", "ä"])
def test_a_name_that_is_not_one_plain_word_is_refused(name: str) -> None:
    with pytest.raises(LabError, match="cannot name a namespace"):
        names.checked(name)


def test_only_names_a_lab_gives_have_an_owner() -> None:
    assert names.owner_of(names.host_name(4242, 7)) == 4242
    assert names.owner_of(names.switch_name(4242)) == 4242
    for foreign in ["gs-0", "gs4242", "gs4242-x", "gs04242-0", "mygs4242-0", "gs4242-0x", "gs4242-100"]:
        assert names.owner_of(foreign) is None


# --- links


# --- the relay's clock


def packet_to(host: int, size: int = 1000, mark: int = 0) -> bytes:
    packet = bytearray(size)
    packet[ADDRESS_OFFSET : ADDRESS_OFFSET + 4] = bytes([198, 18, 0, host + 1])
    packet[-1] = mark
    return bytes(packet)


def relay_of(hosts: int, delay: float, rate: int, queue: float, tuns: list[int] | None = None) -> Relay:
    """A star's: line i leads to host i."""
    addresses = [bytes([198, 18, 0, host + 1]) for host in range(hosts)]
    routes = {(port, addresses[host]): (host, (host,)) for port in range(hosts) for host in range(hosts)}
    return Relay(tuns or list(range(hosts)), [(rate, delay)] * hosts, routes, queue)


def arrivals(relay: Relay) -> list[tuple[float, int, int]]:
    """(time, receiver, mark) of the packets held, in the order in which they will be delivered."""
    return [(pytest.approx(time), route[0], packet[-1]) for time, _, route, packet in sorted(relay.held)]


def test_the_relay_sends_one_packet_at_a_time_down_a_line() -> None:
    relay = relay_of(3, delay=0.005, rate=8_000_000, queue=0.1)  # 1,000 bytes take 1 ms
    relay.accept(0, packet_to(1, mark=1), now=1.0)
    relay.accept(0, packet_to(1, mark=2), now=1.0)
    relay.accept(0, packet_to(2, mark=3), now=1.0)  # another line, so it need not wait
    assert arrivals(relay) == [(1.006, 1, 1), (1.006, 2, 3), (1.007, 1, 2)]


def test_the_relay_drops_what_would_wait_longer_than_the_queue_holds() -> None:
    relay = relay_of(2, delay=0.0, rate=8_000_000, queue=0.0105)
    for _ in range(50):
        relay.accept(0, packet_to(1), now=1.0)
    assert len(relay.held) == 11
    assert relay.bytes_held == 11_000


@pytest.mark.parametrize(
    "address", [[198, 18, 0, 0], [198, 18, 0, 3], [198, 18, 0, 255], [8, 8, 8, 8], [224, 0, 0, 1]]
)
def test_the_relay_drops_packets_for_nobody(address: list[int]) -> None:
    packet = bytearray(packet_to(0))
    packet[ADDRESS_OFFSET : ADDRESS_OFFSET + 4] = bytes(address)
    relay = relay_of(2, delay=0.005, rate=0, queue=0.1)
    relay.accept(0, bytes(packet), now=1.0)
    relay.accept(0, packet_to(1)[: ADDRESS_OFFSET + 3], now=1.0)  # cut off within the address
    relay.accept(0, b"", now=1.0)
    assert relay.held == []


# --- ranks


# --- signals


# --- what is missing


@pytest.mark.parametrize(
    ("tool", "package"), [("ip", "iproute2"), ("tc", "iproute2"), ("setpriv", "util-linux")]
)
def test_a_missing_program_is_named_with_its_package(
    tool: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        tools.shutil, "which", lambda name, path: None if name == tool else f"/usr/sbin/{name}"
    )
    assert available() == f"the program `{tool}` is missing; install it, e.g. `apt install {package}`"
    with pytest.raises(LabError, match=f"the program `{tool}` is missing"):
        tools.path_of(tool)


# --- command line


def parsed(*argv: str) -> argparse.Namespace:
    return main.parsed(["lab", "run", *argv])


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--hosts", "0", "--", "true"], "hosts is 0; a lab has 1 to 64"),
        (["--rate", "fast", "--", "true"], "rate 'fast' is not a link rate"),
        (["--delay", "5", "--", "true"], "delay '5' is not a one-way delay"),
        (["--network", "/nowhere/n.toml", "--", "true"], "/nowhere/n.toml cannot be read"),
        (["--network", "n.toml", "--rate", "1gbit", "--", "true"], "leave --hosts, --rate and --delay out"),
        (["--json", "/nowhere/out.json", "--", "true"], "No such file or directory: '/nowhere/out.json'"),
    ],
)
def test_a_wrong_setting_is_exit_code_2_and_one_line(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args = parsed(*argv)
    assert args.call(args) == 2
    error = capsys.readouterr().err
    assert error.startswith("gradsieve lab: ")
    assert complaint in error
    assert error.count("\n") == 1
