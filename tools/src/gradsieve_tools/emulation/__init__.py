"""A real multi-host network on one Linux machine.

    with Lab(hosts=4, rate="1gbit", delay="5ms") as lab:
        exit_codes = lab.run(["python", "train.py"])

Each host is a network namespace with its own address on `eth0`; switches join them; the kernel's own TCP
runs between them. Reading order:

    lab.py         what a user holds
    topology.py    which hosts, switches and links there are: a star, or what a file says
    network.py     the same as lines for `ip` and `tc`
    quotas.py      processors that a host may use
    relay.py       delay, where the kernel has no netem
    ranks.py       one process a host, watched to its end
    namespaces.py  making, entering, emptying, sweeping

These import nothing of gradsieve but its errors and what reads a file, and never torch. Faults of real ranks
have packages of their own, which do: `chaos/`, `soak/`, and `spot/` under a real launcher.
"""

from gradsieve_tools.emulation.lab import Lab
from gradsieve_tools.emulation.tools import available

__all__ = ["Lab", "available"]
