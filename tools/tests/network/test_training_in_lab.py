"""Training on four hosts over shaped links: replicas stay the same bits, and one that does not is caught.

This file is also the program that every host runs: `python test_training.py FOLDER`.
"""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve
from gradsieve_tools.emulation import Lab

pytestmark = [pytest.mark.lab, pytest.mark.nightly]

HOSTS, STEPS, DRIFTING, ODD = 4, 30, 120, 2
SCHEMES = ["oktopk", "exdyna", "stripes"]


# -- on a host ----------------------------------------------------------------------------------------


def bytes_of(model: nn.Module) -> bytes:
    return b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())


def train(scheme: str, folder: Path, diverge: bool = False) -> None:
    """Leaves the parameters' bytes as they were at first and are at last."""
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 48), nn.Tanh(), nn.Linear(48, 8))
    (folder / f"{scheme}.{rank}.first").write_bytes(bytes_of(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
    # Exchanging steps, what a rank changes by itself is its own step; with gradients it is an error.
    preset = gradsieve.Gradients() if diverge else gradsieve.Steps()
    sync = gradsieve.attach(ddp, optimizer, scheme=scheme, density=0.02, exchange=preset)
    source = torch.Generator().manual_seed(rank)
    for step in range(DRIFTING if diverge else STEPS):
        inputs = torch.randn(16, 64, generator=source)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(inputs), inputs[:, :8].argmax(1)).backward()
        optimizer.step()
        if diverge and step == DRIFTING // 4 and rank == ODD:
            with torch.no_grad():
                model[0].weight[0, 0] += 1e-3
    if not diverge:
        sync.flush()
    (folder / f"{scheme}.{rank}.last").write_bytes(bytes_of(model))
    sync.close()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for scheme in SCHEMES:
        train(scheme, folder)
    apart = folder / "drifting"
    apart.mkdir(exist_ok=True)
    try:
        train("exdyna", apart, diverge=True)
    except gradsieve.DivergenceError as error:
        (apart / f"{dist.get_rank()}.said").write_text(str(error))
        raise


# -- the tests ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All schemes one after the other, on the same four processes; then one host drifts."""
    folder = tmp_path_factory.mktemp("training")
    with Lab(HOSTS, rate="1gbit") as lab:
        assert lab.run([sys.executable, __file__, str(folder)], timeout=240) == [1] * HOSTS
    return folder


def replicas(folder: Path, scheme: str, when: str) -> list[bytes]:
    return [(folder / f"{scheme}.{rank}.{when}").read_bytes() for rank in range(HOSTS)]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_four_hosts_hold_the_same_bytes(trained: Path, scheme: str) -> None:
    first, last = replicas(trained, scheme, "first"), replicas(trained, scheme, "last")
    assert [rank for rank in range(HOSTS) if last[rank] != last[0]] == []
    assert len(last[0]) == len(first[0]) == 4 * (64 * 96 + 96 + 96 * 48 + 48 + 48 * 8 + 8)
    assert last[0] != first[0], "nothing was learnt"


def test_every_sparse_scheme_goes_its_own_way(trained: Path) -> None:
    """Or the files above would not be from the schemes that they are named after."""
    ends = {scheme: replicas(trained, scheme, "last")[0] for scheme in SCHEMES}
    assert len(set(ends.values())) == len(SCHEMES)


def test_a_host_that_drifts_is_caught(trained: Path) -> None:
    """One value on one host, a thousandth, in step 30: the comparison in step 100 stops all of them."""
    apart = trained / "drifting"
    for rank in range(HOSTS):
        said = (apart / f"{rank}.said").read_text()
        assert said.startswith(f"rank {rank}: replicas differ after step 100")
        assert f"stand ranks [{ODD}]" in said
    assert not [*apart.glob("*.last")], "training went on"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
