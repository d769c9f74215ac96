"""What every rank needs and what takes long to load: once, in the fork server."""

import pytest  # noqa: F401
import torch
import torch._dynamo
import torch.distributed.checkpoint

import gradsieve.parallel.ddp  # noqa: F401
from gradsieve.kernels import choice

choice.active()
choice.low_bit_form_for(torch.zeros(1), torch.float32)
