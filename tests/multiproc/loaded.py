"""What every rank needs and what takes long to load: once, in the fork server."""

import pytest  # noqa: F401
import torch
import torch._dynamo
import torch.distributed.checkpoint

import gradsieve.parallel.ddp  # noqa: F401
from gradsieve import kernels

kernels.active()
kernels.encode_low(1, torch.zeros(1))
