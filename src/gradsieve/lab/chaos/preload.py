"""What the fork server loads once for all ranks: no thread may run there, threads do not survive a fork."""

import torch._dynamo  # which the first optimizer of a process would load

from gradsieve.lab.chaos import rank

__all__ = ["rank", "torch"]
