"""Recorded gradients are those of a real training, in the pipeline's order, and the same in every run."""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from gradsieve.errors import ConfigError
from gradsieve.feedback.units import make_units
from gradsieve_tools.bench.common import models
from gradsieve_tools.bench.common.models import Task, interactions, sources
from gradsieve_tools.bench.common.recordings import Recording, record

IMAGES = 64


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Files in the format of Fashion-MNIST: the label of an image is how bright it is."""
    labels = torch.arange(IMAGES, dtype=torch.uint8) % 10
    noise = torch.randint(0, 20, (IMAGES, 784), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pixels = noise + labels[:, None] * 20
    files = {
        "images-idx3": bytes(16) + bytes(pixels.flatten().tolist()),
        "labels-idx1": bytes(8) + bytes(labels.tolist()),
    }
    for name, content in files.items():
        (tmp_path / f"train-{name}-ubyte.gz").write_bytes(gzip.compress(content))
    return tmp_path


def small(model: str, images: Path) -> Task:
    torch.manual_seed(0)
    if model == "cnn":
        return models.cnn(images, width=8, batch=16)
    if model == "transformer":
        return models.transformer(width=16, layers=1, context=8, batch=8, most_bytes=60_000)
    return models.recommender(width=4, items=500, batch=128, most_bytes=60_000)


@pytest.mark.parametrize("model", models.MODELS)
def test_a_recording_is_a_training_and_repeats_bit_by_bit(model: str, images: Path) -> None:
    task = small(model, images)
    made = [record(deepcopy(task), 2, 8, warm=12, seed=seed) for seed in (1, 1, 2)]
    assert made[0].gradients.shape == (8, 2, task.n)
    assert sum(made[0].sizes) == made[0].n == task.n
    assert torch.equal(made[0].gradients, made[1].gradients)
    assert not torch.equal(made[0].gradients, made[2].gradients)
    assert not torch.equal(made[0].gradients[:, 0], made[0].gradients[:, 1])
    assert made[0].gradients.isfinite().all()
    losses = made[0].losses
    assert len(losses) == 20
    assert sum(losses[-5:]) < sum(losses[:5])


def line(world: int, examples: int = 12) -> Task:
    """Two layers whose gradients are easily had; input i is the i-th unit vector, so that its use shows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(examples, 3), nn.Linear(3, 2))
    return Task(model, (torch.eye(examples),), torch.ones(examples, 2), mse_loss, batch=world, rate=0.5)


def test_gradients_lie_in_the_order_of_the_pipelines_units() -> None:
    task = line(1)
    before = [parameter.detach().clone() for parameter in task.model.parameters()]
    made = record(task, 1, 1, warm=0)
    (unit,) = make_units(task.model.named_parameters(), cap_bytes=1 << 30, small=0)
    assert made.sizes == unit.sizes == [2, 6, 3, 36]
    # The model moved by the mean gradient, which is the only rank's: what it moved by is what was recorded.
    moved = [(old - new) / task.rate for old, new in zip(before, task.model.parameters(), strict=True)]
    recorded = made.gradients[0, 0].split(made.sizes)
    for mine, parameter in zip(recorded, reversed(moved), strict=True):
        torch.testing.assert_close(mine, parameter.flatten())


def test_the_model_moves_by_the_mean_over_ranks() -> None:
    task = line(3)
    before = torch.cat(
        [parameter.detach().flatten() for parameter in reversed(list(task.model.parameters()))]
    )
    made = record(task, 3, 1, warm=0)
    after = torch.cat([parameter.detach().flatten() for parameter in reversed(list(task.model.parameters()))])
    torch.testing.assert_close(before - after, task.rate * made.gradients[0].mean(0))


def test_every_rank_has_its_own_part_of_the_examples() -> None:
    made = record(line(3), 3, 10, warm=0)
    first_layer = made.gradients[..., -36:].view(10, 3, 3, 12)
    used = first_layer.abs().sum((0, 2)) > 0
    for rank in range(3):
        assert {index % 3 for index in used[rank].nonzero().flatten().tolist()} == {rank}


def test_steps_before_the_first_kept_one_are_not_kept() -> None:
    whole, late = record(line(2), 2, 5, warm=0), record(line(2), 2, 2, warm=3)
    assert torch.equal(whole.gradients[3:], late.gradients)
    assert whole.losses == late.losses
    reported: list[int] = []
    record(line(2), 2, 2, warm=3, after_step=reported.append)
    assert reported == [1, 2, 3, 4, 5]


def test_embedding_gradients_are_sparse_and_skewed(images: Path) -> None:
    task = small("recommender", images)
    made: Recording = record(task, 2, 1, warm=0)
    assert (made.gradients[0, 0] != 0).float().mean() < 0.5
    uses = torch.bincount(task.inputs[1][task.target == 1]).sort(descending=True).values
    assert uses[:25].sum() > 0.25 * uses.sum()  # a twentieth of the words has a quarter of the uses
    others = torch.bincount(task.inputs[1][task.target == 0]).sort(descending=True).values
    assert others[:25].sum() < 0.15 * others.sum()


def test_interactions_by_hand() -> None:
    files = [b"import alpha, beta; alpha()", b"beta gamma gamma x yy", b"alpha rare"]
    users, words, used = interactions(files, items=3)
    seen = Counter(zip(users.tolist(), words.tolist(), used.tolist(), strict=True))
    wanted = {(0, 0): 2, (0, 1): 1, (1, 1): 1, (1, 2): 2, (2, 0): 1}  # numbered as they first appear
    assert {pair[:2]: count for pair, count in seen.items() if pair[2] == 1} == wanted
    assert not {pair[:2] for pair in seen if pair[2] == 0} & set(wanted)


def library(folder: Path, *files: str) -> Path:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(f"# {Path(file).name}")
    return folder


def test_sources_are_the_librarys_own_files_in_order(tmp_path: Path) -> None:
    folder = library(
        tmp_path, "zipfile.py", "abc.py", "json/tool.py", "json/tests/x.py", "test/y.py", "mine.py"
    )
    library(tmp_path, "site-packages/json.py")
    assert sources(1000, folder) == [b"# abc.py", b"# tool.py", b"# zipfile.py"]
    assert sources(20, folder) == [b"# abc.py", b"# tool.py"]


def test_a_library_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--models cnn"):
        sources(1000, tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.unlink(),
        lambda file: file.write_bytes(b"no gzip"),
        lambda file: file.write_bytes(file.read_bytes()[:-20]),
    ],
    ids=["missing", "other", "cut off"],
)
def test_images_that_cannot_be_read_say_how_to_install_them(
    images: Path, damage: Callable[[Path], None]
) -> None:
    damage(images / "train-images-idx3-ubyte.gz")
    with pytest.raises(ConfigError, match="apt-get install dataset-fashion-mnist"):
        models.cnn(images)


def test_models_have_the_size_they_are_meant_to_have_and_do_not_touch_the_callers_numbers(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(models.MODELS, "cnn", lambda: models.cnn(images))
    before = torch.get_rng_state()
    for model in ("cnn", "transformer"):
        first, second = models.build(model), models.build(model)
        assert 200_000 < first.n < 600_000
        pairs = zip(first.model.parameters(), second.model.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
    assert torch.equal(before, torch.get_rng_state())
