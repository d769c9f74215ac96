"""P virtual ranks in one process, advanced together from one op to the next.

A rank that asks for another op than its peers is named, not waited for. Sums are formed in rank order.

The tensor of an op is overwritten on every second rank once the reply is there, and left as it was on the
others: engines do either. A program that reads its tensor afterwards goes wrong here, and differently on some
ranks than on others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradsieve.comm.ops import AllGather, AllReduce, AllToAll, Broadcast, Exchange, Meter, Op, describe
from gradsieve.errors import MismatchError
from gradsieve.types import Program, Result


def run(
    programs: Sequence[Program[Result]],
    meters: Sequence[Meter] | None = None,
    observe: Callable[[Sequence[Op]], None] = lambda ops: None,
) -> list[Result]:
    """Drive one program a rank to its end, and return the results in rank order. `observe` is called with the
    ops of all ranks before they are performed."""
    world = len(programs)
    results: dict[int, Result] = {}
    replies: list[Tensor | None] = [None] * world
    turn = 0
    while True:
        asked: list[Op | None] = [None] * world
        for rank, program in enumerate(programs):
            try:
                asked[rank] = program.send(replies[rank])  # type: ignore[arg-type]  # None starts a generator
            except StopIteration as end:
                results[rank] = end.value
            replies[rank] = None
        ops = _agreed(asked)
        if ops is None:
            return [results[rank] for rank in range(world)]
        if meters is not None:
            for meter, op in zip(meters, ops, strict=True):
                meter.count(op)
        observe(ops)
        replies = _perform(ops)
        for op in ops[turn % 2 :: 2]:
            _spoil(op.tensor)
        turn += 1


def _agreed(asked: list[Op | None]) -> list[Op] | None:
    """Return the ops of all ranks if they are of one kind; None if all ranks are done."""
    words = ["nothing more" if op is None else describe(op) for op in asked]
    usual, _ = Counter(words).most_common(1)[0]
    odd = [f"rank {rank} asked for {word}" for rank, word in enumerate(words) if word != usual]
    if odd:
        raise MismatchError(f"{'; '.join(odd)}; the other ranks asked for {usual}")
    present = [op for op in asked if op is not None]
    return present or None


def _perform(ops: list[Op]) -> list[Tensor | None]:
    world = len(ops)
    tensors = [op.tensor for op in ops]
    match ops[0]:
        case AllGather():
            return [torch.stack(tensors)] * world
        case AllReduce():
            total = tensors[0].clone()
            for tensor in tensors[1:]:
                total += tensor
            return [total] * world
        case Broadcast(root=root):
            if not 0 <= root < world:
                raise MismatchError(f"all ranks name root {root}, outside 0..{world - 1}")
            return [tensors[root].clone()] * world
        case AllToAll():
            return _all_to_all([op for op in ops if isinstance(op, AllToAll)])
        case Exchange():
            return _exchange([op for op in ops if isinstance(op, Exchange)])


def _spoil(tensor: Tensor) -> None:
    """Overwrite what may not be read any more: no sum hides NaN, no vector has such an index."""
    kind = tensor.dtype
    tensor.fill_(torch.nan if kind.is_floating_point else kind is torch.bool or torch.iinfo(kind).max)


def _all_to_all(ops: list[AllToAll]) -> list[Tensor | None]:
    for rank, op in enumerate(ops):
        counts = (op.send_counts, op.receive_counts)
        if any(len(count) != len(ops) for count in counts) or sum(op.send_counts) != op.tensor.shape[0]:
            raise MismatchError(
                f"rank {rank} announces {sum(op.send_counts)} rows for {len(op.send_counts)} ranks "
                f"but hands over {op.tensor.shape[0]} rows to {len(ops)} ranks"
            )
    sent = torch.tensor([op.send_counts for op in ops], dtype=torch.int64, device="cpu")
    expected = sent.new_tensor([op.receive_counts for op in ops]).T
    wrong = (sent != expected).nonzero()
    if wrong.numel():
        sender, receiver = wrong[0].tolist()
        raise MismatchError(
            f"rank {sender} sends {int(sent[sender, receiver])} rows to rank {receiver}, "
            f"which expects {int(expected[sender, receiver])}"
        )
    # All rows in one tensor, sorted by receiver: a slice for each pair of ranks would be a million at 1,024.
    ranks = torch.arange(len(ops), dtype=sent.dtype, device=sent.device)
    receivers = ranks.repeat(len(ops)).repeat_interleave(sent.flatten())
    rows = torch.cat([op.tensor for op in ops])[receivers.sort(stable=True).indices]
    return list(torch.split(rows, sent.sum(0).tolist()))


def _exchange(ops: list[Exchange]) -> list[Tensor | None]:
    replies: list[Tensor | None] = []
    for rank, op in enumerate(ops):
        if not (0 <= op.source < len(ops) and 0 <= op.to < len(ops)):
            raise MismatchError(f"rank {rank} names a peer outside 0..{len(ops) - 1}")
        peer = ops[op.source]
        if peer.to != rank or peer.tensor.numel() != op.receive:
            raise MismatchError(
                f"rank {rank} expects {op.receive} elements from rank {op.source}, "
                f"which sends {peer.tensor.numel()} to rank {peer.to}"
            )
        replies.append(peer.tensor.clone())
    return replies
