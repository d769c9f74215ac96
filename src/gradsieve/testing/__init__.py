"""For authors of schemes: virtual ranks in one process, and the laws that every scheme obeys.

from gradsieve.testing import check_scheme

def test_my_scheme_is_lawful():
    check_scheme(MyScheme(density=0.01))
"""

from gradsieve.comm.lockstep import run
from gradsieve.testing.check import check_scheme
from gradsieve.testing.gradients import KINDS, Source
from gradsieve.testing.ranks import Round, VirtualRanks

__all__ = ["KINDS", "Round", "Source", "VirtualRanks", "check_scheme", "run"]
