"""What only the lab raises; everything else it raises is `gradsieve.errors`."""

from gradsieve.errors import GradsieveError


class LabError(GradsieveError, RuntimeError):
    """The test network cannot be built on this machine: root or `ip` is missing, or a name is bad."""


class SimulationError(GradsieveError, RuntimeError):
    """The network simulator is missing or broke off."""
