"""Trains `examples/two_sites.py` over WireGuard and without it, by turns, on the same shaped links.

    apt-get install wireguard-go wireguard-tools
    python scripts/vpn.py --json benchmarks/results/vpn.json

Every host of the lab is a peer of every other. `wireguard-go` runs in user space; a host whose kernel has
WireGuard pays less processor time than this measures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gradsieve_tools.emulation import Lab
from gradsieve_tools.emulation.namespaces import entering

ROOT = Path(__file__).parents[1]
PORT = 51820


def inside(host: int) -> str:
    return f"10.99.0.{host + 1}"


def said(argv: Sequence[str], text: str | None = None) -> str:
    done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv)}: {done.stderr.strip() or done.returncode}")
    return done.stdout.strip()


class Tunnels:
    """One `wg0` in each host of a lab."""

    def __init__(self, lab: Lab, keys: Path) -> None:
        self.lab = lab
        self.programs: list[subprocess.Popen[bytes]] = []
        private = [said(["wg", "genkey"]) for _ in lab.addresses]
        public = [said(["wg", "pubkey"], key) for key in private]
        for host, key in enumerate(private):
            own = f"gs{os.getpid()}w{host}"  # its socket has this name, in a folder that all hosts share
            self.programs.append(self._start(host, own))
            (file := keys / own).touch(mode=0o600)
            file.write_text(key)
            peers: list[str] = []
            for other, address in enumerate(lab.addresses):
                if other != host:
                    peers += ["peer", public[other], "allowed-ips", f"{inside(other)}/32"]
                    peers += ["endpoint", f"{address}:{PORT}"]
            self.on(host, "wg", "set", own, "listen-port", str(PORT), "private-key", str(file), *peers)
            self.on(host, "ip", "link", "set", own, "name", "wg0")
            self.on(host, "ip", "address", "add", f"{inside(host)}/24", "dev", "wg0")
            self.on(host, "ip", "link", "set", "wg0", "up")

    def on(self, host: int, *argv: str) -> str:
        return said(entering(self.lab.netns(host), argv))

    def _start(self, host: int, own: str) -> subprocess.Popen[bytes]:
        argv, env = entering(self.lab.netns(host), ["wireguard-go", "-f", own]), {"LOG_LEVEL": "silent"}
        program = subprocess.Popen(argv, env=os.environ | env, stderr=subprocess.DEVNULL)
        socket, deadline = Path("/var/run/wireguard") / f"{own}.sock", time.monotonic() + 10
        while not socket.exists():
            if time.monotonic() > deadline or program.poll() is not None:
                raise SystemExit(f"wireguard-go does not run on host {host}")
            time.sleep(0.01)
        return program

    def close(self) -> None:
        for program in self.programs:
            program.terminate()  # it removes its socket
            program.wait()

    def seconds(self) -> float:
        """Of processor time that all tunnels together have taken."""
        ticks = 0
        for program in self.programs:
            fields = Path(f"/proc/{program.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


def sent(tunnels: Tunnels) -> int:
    """Bytes that all hosts have put on their links."""
    hosts = range(len(tunnels.lab.addresses))
    return sum(int(tunnels.on(host, "cat", "/sys/class/net/eth0/statistics/tx_bytes")) for host in hosts)


def trained(tunnels: Tunnels, over: str, log: Path, arguments: Sequence[str]) -> dict[str, Any]:
    env = {} if over == "plain" else {"MASTER_ADDR": inside(0), "GLOO_SOCKET_IFNAME": "wg0"}
    bytes_before, seconds_before = sent(tunnels), tunnels.seconds()
    with log.open("wb") as stream:
        argv = [sys.executable, str(ROOT / "examples" / "two_sites.py"), *arguments]
        processes = tunnels.lab.spawn(argv, env=env, stdout=stream, stderr=stream)
        codes = [process.wait(timeout=900) for process in processes]
    text = log.read_text()
    if any(codes):
        raise SystemExit(f"{over}: exit codes {codes}\n{text[-3000:]}")
    ours, alone, dense = map(int, re.findall(r"a step +(\d+) ms; alone (\d+), dense (\d+)", text)[0])
    return {
        "over": over,
        "step_ms": ours,
        "alone_ms": alone,
        "dense_ms": dense,
        "megabytes": (sent(tunnels) - bytes_before) / 1e6,
        "tunnel_cpu_s": tunnels.seconds() - seconds_before,
        "last": re.findall(r"site 0, step \d+: loss [\d.]+", text)[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="50mbit")
    parser.add_argument("--delay", default="20ms")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("training", nargs="*", help="arguments of examples/two_sites.py, after --")
    args = parser.parse_args()
    results = []
    with Lab(args.hosts, args.rate, args.delay) as lab:
        folder = Path("/run") / f"gradsieve-vpn-{os.getpid()}"
        folder.mkdir(mode=0o700)
        try:
            with contextlib.closing(Tunnels(lab, folder)) as tunnels:
                for _ in range(args.rounds):
                    for over in ("plain", "wireguard"):
                        results.append(trained(tunnels, over, folder / "log", args.training))
                        print(json.dumps(results[-1]), flush=True)
        finally:
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
    if args.json:
        about = {"command": " ".join(["python", *sys.argv]), "torch": torch.__version__}
        args.json.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
