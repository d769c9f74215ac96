"""The parts of the lab that need no network: units, names, lines for `ip` and `tc`, the relay's clock."""

import argparse
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradsieve.errors import ConfigError
from gradsieve_tools.cli import main
from gradsieve_tools.emulation import Lab, available, names, network, ranks, signals, tools
from gradsieve_tools.emulation.relay import Relay
from gradsieve_tools.emulation.topology import star
from gradsieve_tools.emulation.units import parse_delay, parse_rate
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


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5ms", 0.005), ("250us", 0.00025), ("1s", 1.0), ("1.5ms", 0.0015), ("0ms", None), (None, None)],
)
def test_a_delay_is_read_as_seconds(text: str | None, seconds: float | None) -> None:
    assert parse_delay(text) == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize("text", ["", "5", "ms", "5 ms", "-5ms", "5m", "5ms\n", "11s", "5ms limit 1"])
def test_what_is_not_a_delay_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"delay {text!r} is not a one-way delay")):
        parse_delay(text)


@pytest.mark.parametrize("hosts", [0, -1, 65, 2.0, "4", True])
def test_a_wrong_number_of_hosts_is_refused(hosts: int) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"hosts is {hosts!r}; a lab has 1 to 64")):
        Lab(hosts)


# --- names


def test_names_of_the_largest_lab_of_the_largest_process_fit() -> None:
    assert names.host_name(4_194_304, 63) == "gs4194304-63"
    assert names.switch_name(4_194_304) == "gs4194304-sw"


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


def test_hosts_have_addresses_of_the_benchmarking_range() -> None:
    addresses = star(64, None, None).addresses
    assert addresses[0] == "198.18.0.1"
    assert addresses[-1] == "198.18.0.64"
    assert len(set(addresses)) == 64


@pytest.mark.parametrize("rate", [10_000, 10**8, 10**9, 10**10, 10**11])
def test_a_bundle_of_frames_fits_into_a_burst_and_a_burst_is_short(rate: int) -> None:
    assert 1514 <= network.bundle_bytes(rate) < network.burst_bytes(rate)
    assert network.burst_bytes(rate) * 8 / rate <= max(0.0005, 4 * 1514 * 8 / rate)


def egress_lines(rate: int | None, delay: float | None, is_relayed: bool = False) -> list[str]:
    built = star(2, rate, delay)
    return network.host_egress_lines(built, [built.ports[0]], is_relayed) + network.switch_egress_lines(built)


def test_where_netem_exists_each_of_two_links_has_half_of_the_delay() -> None:
    half = "root netem delay 2500us limit 1000000"
    devices = ["eth0", "port0", "port1"]
    assert egress_lines(None, 0.005) == [f"qdisc add dev {device} {half}" for device in devices]
    shaped = "root netem delay 2500us rate 1000000000bit limit 8463"
    assert egress_lines(10**9, 0.005) == [f"qdisc add dev {device} {shaped}" for device in devices]


def test_a_relay_delays_by_itself_and_hosts_only_shape() -> None:
    built = star(2, 10**8, 0.005)
    shaper = "qdisc add dev eth0 root tbf rate 100000000bit burst 6056 latency 100ms"
    assert network.host_egress_lines(built, [built.ports[0]], True) == [shaper]


def test_without_delay_a_link_is_shaped_at_both_ends_or_not_at_all() -> None:
    shaper = "tbf rate 100000000bit burst 6056 latency 100ms"
    devices = ["eth0", "port0", "port1"]
    assert egress_lines(10**8, None) == [f"qdisc add dev {device} root {shaper}" for device in devices]
    assert egress_lines(None, None) == []


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


def test_the_relay_delays_each_packet_and_keeps_order() -> None:
    relay = relay_of(2, delay=0.005, rate=0, queue=0.1)
    for mark in range(3):
        relay.accept(0, packet_to(1, mark=mark), now=1.0)
    assert arrivals(relay) == [(1.005, 1, 0), (1.005, 1, 1), (1.005, 1, 2)]


def test_the_relay_sends_one_packet_at_a_time_down_a_line() -> None:
    relay = relay_of(3, delay=0.005, rate=8_000_000, queue=0.1)  # 1,000 bytes take 1 ms
    relay.accept(0, packet_to(1, mark=1), now=1.0)
    relay.accept(0, packet_to(1, mark=2), now=1.0)
    relay.accept(0, packet_to(2, mark=3), now=1.0)  # another line, so it need not wait
    assert arrivals(relay) == [(1.006, 1, 1), (1.006, 2, 3), (1.007, 1, 2)]


def test_a_packet_under_way_does_not_keep_others_from_the_line_it_will_need() -> None:
    lines = [(0, 0.050), (8_000_000, 0.0)]  # a long way, then the receiver's line
    address = bytes([198, 18, 0, 2])
    relay = Relay([0, 1, 2], lines, {(0, address): (1, (0, 1)), (2, address): (1, (1,))}, queue=0.1)
    relay.accept(0, packet_to(1, mark=1), now=1.0)
    relay.accept(2, packet_to(1, mark=2), now=1.01)
    assert arrivals(relay) == [(1.011, 1, 2), (1.05, 1, 1)]  # the first has its last line still before it
    relay.held = [entry for entry in relay.held if entry[3][-1] == 1]
    relay.deliver(now=1.0505)
    assert arrivals(relay) == [(1.051, 1, 1)]


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


def test_the_relay_delivers_when_due_and_not_before() -> None:
    read, write = os.pipe()
    os.set_blocking(read, False)
    relay = relay_of(1, delay=0.005, rate=0, queue=0.1, tuns=[write])
    relay.accept(0, packet_to(0), now=1.0)
    relay.deliver(now=1.0049)
    with pytest.raises(BlockingIOError):
        os.read(read, 2000)
    relay.deliver(now=1.0051)
    assert os.read(read, 2000) == packet_to(0)
    assert relay.bytes_held == 0
    os.close(read)
    os.close(write)


# --- ranks


def test_the_users_environment_wins_over_the_labs_thread_count_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "99")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert ranks.environment(1, star(2, None, None), None)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    found = ranks.environment(1, star(2, None, None), {"MASTER_PORT": "1234"})
    assert (found["OMP_NUM_THREADS"], found["RANK"], found["MASTER_PORT"]) == ("2", "1", "1234")


# --- signals


@pytest.fixture
def interruptible() -> Iterator[None]:
    """As at a terminal: a process that a script started in the background is born deaf to SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_signals_held_back_take_effect_when_the_block_ends() -> None:
    steps = []

    def interrupted() -> None:
        with signals.held_back():
            signal.raise_signal(signal.SIGINT)
            steps.append("the block went on")
        steps.append("what follows it did not")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert steps == ["the block went on"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ending_signals_unwind_and_foreign_handlers_are_left_alone() -> None:
    usual = signal.signal(signal.SIGHUP, lambda *_: None)
    foreign = signal.getsignal(signal.SIGHUP)
    replaced = signals.unwind_on_ending()
    try:
        assert list(replaced) == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGHUP) is foreign
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(signal.SIGTERM)
        assert ended.value.code == 143
    finally:
        signals.restore(replaced)
        signal.signal(signal.SIGHUP, usual)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


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


def test_missing_rights_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools.shutil, "which", lambda name, path: f"/usr/sbin/{name}")
    monkeypatch.setattr(tools, "_effective_capabilities", lambda: 1 << 12)
    assert available() == "this process lacks CAP_SYS_ADMIN; run it as root (sudo, or a privileged container)"
    with pytest.raises(LabError, match="the lab cannot run here: this process lacks CAP_SYS_ADMIN"), Lab(2):
        pass


def test_another_system_than_linux_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools.platform, "system", lambda: "Darwin")
    assert available() == "the lab is made of Linux network namespaces, and this is Darwin"


# --- command line


def parsed(*argv: str) -> argparse.Namespace:
    return main.parsed(["lab", "run", *argv])


def test_everything_after_two_dashes_is_the_command() -> None:
    args = parsed("--hosts", "2", "--rate", "1gbit", "--", "python", "x.py", "--hosts", "9", "--", "-v")
    assert (args.hosts, args.rate, args.delay, args.timeout, args.json) == (2, "1gbit", None, None, None)
    assert args.command == ["--", "python", "x.py", "--hosts", "9", "--", "-v"]
    assert parsed("--json", "out.json", "--", "true").json == Path("out.json")


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
