"""The parts of the lab that need no network: units, names, lines for `ip` and `tc`, the relay's clock."""

import re

import pytest

from gradsieve.errors import ConfigError
from gradsieve_tools.emulation import names
from gradsieve_tools.emulation.relay import Relay
from gradsieve_tools.emulation.units import parse_rate
from gradsieve_tools.errors import LabError

ADDRESS_OFFSET = 26  # destination address: virtio header (10 bytes) + 16 bytes into the IPv4 header


@pytest.mark.parametrize(
    "text",
    ["", "1", "gbit", "1 gbit", "1gbit\n", "-1gbit", "1e9bit", "0gbit", "9kbit", "101gbit", "1gbit root"],
)
def test_what_is_not_a_rate_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"rate {text!r} is not a link rate")):
        parse_rate(text)


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


@pytest.mark.parametrize("name", ["", "a" * 13, "A", "a b", "../etc", "a\n", "a;b", "ä"])
def test_a_name_that_is_not_one_plain_word_is_refused(name: str) -> None:
    with pytest.raises(LabError, match="cannot name a namespace"):
        names.checked(name)


def test_only_names_a_lab_gives_have_an_owner() -> None:
    assert names.owner_of(names.host_name(4242, 7)) == 4242
    assert names.owner_of(names.switch_name(4242)) == 4242
    for foreign in ["gs-0", "gs4242", "gs4242-x", "gs04242-0", "mygs4242-0", "gs4242-0x", "gs4242-100"]:
        assert names.owner_of(foreign) is None
