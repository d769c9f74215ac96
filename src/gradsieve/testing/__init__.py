"""Virtual ranks in one process, and the laws that every scheme obeys.

from gradsieve.testing import check_scheme

def test_my_scheme_is_lawful():
    check_scheme(MyScheme(density=0.01))

`VirtualRanks` and `lockstep` run a scheme by itself. A whole training on virtual ranks has a pipeline for
each (`adapt`), whose programs `lockstep` runs; `capture` and `restore` are its checkpoints, and `Merger` one
for another number of ranks.
"""

from gradsieve import kernels
from gradsieve.checkpoint.rank_state import Merger, capture, restore, source_rank
from gradsieve.coherence import Coherence
from gradsieve.comm import lockstep
from gradsieve.comm.lockstep import run
from gradsieve.comm.ops import Meter
from gradsieve.pipeline import UNIT_CAP_MB, Pending, Pipeline, StepPipeline, make_pipeline
from gradsieve.pipeline.budget import Budget
from gradsieve.pipeline.exchange_settings import Exchange
from gradsieve.pipeline.gradients import GradientPipeline
from gradsieve.ranks_alike import digest
from gradsieve.schemes.stripes import cost
from gradsieve.testing.check import check_scheme
from gradsieve.testing.gradients import KINDS, Source
from gradsieve.testing.ranks import Round, VirtualRanks

__all__ = [
    "KINDS",
    "UNIT_CAP_MB",
    "Budget",
    "Coherence",
    "Exchange",
    "GradientPipeline",
    "Merger",
    "Meter",
    "Pending",
    "Pipeline",
    "Round",
    "Source",
    "StepPipeline",
    "VirtualRanks",
    "capture",
    "check_scheme",
    "cost",
    "digest",
    "kernels",
    "lockstep",
    "make_pipeline",
    "restore",
    "run",
    "source_rank",
]
