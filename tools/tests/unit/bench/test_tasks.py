"""The training tasks: what they learn from, and that they learn."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gradsieve.errors import ConfigError
from gradsieve_tools.bench.common.models import sources
from gradsieve_tools.bench.tasks import documentation as documents
from gradsieve_tools.bench.tasks.data import DataSet, apart, fashion_mnist, ratings, source_text
from gradsieve_tools.bench.tasks.training import TASKS, batches, build, shards
from gradsieve_tools.commands.values import tasks as task_names

IMAGES = {"train": 320, "t10k": 40}
TEXT = 1_000_000
"""Bytes of source files, at most."""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files in the format of Fashion-MNIST: the label of an image is how bright it is."""
    folder = tmp_path_factory.mktemp("images")
    random = torch.Generator().manual_seed(0)
    for part, count in IMAGES.items():
        labels = torch.randint(10, (count,), dtype=torch.uint8, generator=random)
        noise = torch.randint(20, (count, 784), dtype=torch.uint8, generator=random)
        pixels = noise + labels[:, None] * 20
        files = {
            "images-idx3": bytes(16) + bytes(pixels.flatten().tolist()),
            "labels-idx1": bytes(8) + bytes(labels.tolist()),
        }
        for name, content in files.items():
            (folder / f"{part}-{name}-ubyte.gz").write_bytes(gzip.compress(content))
    return folder


@pytest.fixture(scope="module")
def manuals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, documents.Source]:
    """Files as Debian's documentation has them: source files of Python, some of them packed."""
    folder = tmp_path_factory.mktemp("manuals")
    (folder / "translations").mkdir()
    for number, content in enumerate(sources(TEXT)):
        (folder / f"{number}.rst.gz").write_bytes(gzip.compress(content))
        (folder / f"{number}.pod").write_bytes(content[::-1] + b"\xff")  # not UTF-8
    (folder / "translations" / "1.rst.gz").write_bytes(gzip.compress(b"in another language"))
    return {
        "linux-doc": documents.Source("6", folder, "**/*.rst.gz"),
        "perl-doc": documents.Source("5", folder, "*.pod"),
    }


@pytest.fixture(scope="module")
def manual_data(manuals: dict[str, documents.Source]) -> DataSet:
    text = documents.read(manuals, most_bytes=TEXT)
    found = b"".join(part.numpy().tobytes() for part in documents.tokens(text))
    return documents.learnable(text, text.sha256, hashlib.sha256(found).hexdigest(), windows=16)


@pytest.fixture
def less_data(images: Path, manual_data: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every task as it is, with little to learn from."""
    less: dict[Callable[[], DataSet], Callable[[], DataSet]] = {
        fashion_mnist: lambda: fashion_mnist(images),
        source_text: lambda: source_text(TEXT, windows=16),
        ratings: lambda: ratings(drawn=20_000, tested=500),
        documents.documentation: lambda: manual_data,
    }
    for name, recipe in TASKS.items():
        monkeypatch.setitem(TASKS, name, replace(recipe, data=less[recipe.data]))


every_task = pytest.mark.parametrize("name", TASKS)
pytestmark = pytest.mark.usefixtures("less_data")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.nightly] * recipe.held_out) for name, recipe in TASKS.items()],
)
def test_a_few_steps_lower_the_loss(name: str) -> None:
    training = build(name, 0, steps=12)
    feed = batches(torch.arange(len(training.train)), training.batch, seed=0)
    same = training.train.take(next(feed)[:16])  # one batch again and again: chance has no say

    losses = []
    for _ in range(training.steps):
        training.optimizer.zero_grad()
        loss = training.loss(training.model(*same.inputs), same.target)
        loss.backward()
        training.optimizer.step()
        training.schedule.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "apart"])
@pytest.mark.parametrize("world", [1, 3, 16])
@every_task
def test_shards_are_all_examples_each_once(name: str, world: int, mixed: bool) -> None:
    training = build(name, 0)
    owned = shards(training, world, mixed)
    assert len(owned) == world
    assert torch.cat(owned).sort().values.tolist() == list(range(len(training.train)))
    assert max(map(len, owned)) - min(map(len, owned)) <= 1


def test_text_of_the_test_is_from_files_that_are_not_learned() -> None:
    files = sources(TEXT)
    learned, held_out = apart([*files, files[9]])  # a copy of a file held out
    assert len(held_out) == (len(files) + 1) // 10
    assert not set(learned) & set(held_out)
    assert set(learned) | set(held_out) == set(files)

    data = source_text(TEXT, windows=16)
    for part, whole in ((data.train, learned), (data.test, held_out)):
        text = b"".join(whole)
        windows = torch.cat([part.inputs[0], part.target[:, -1:]], 1)
        assert all(bytes(window) in text for window in windows[:: len(windows) // 8].tolist())


def test_documentation_is_split_by_file_and_names_alone_decide(manuals: dict[str, documents.Source]) -> None:
    text = documents.read(manuals, most_bytes=TEXT)
    assert not text.learned.keys() & text.held_out.keys()
    assert 0.02 < len(text.held_out) / len(text.learned) < 0.25
    assert sum(len(part.encode()) for part in (*text.learned.values(), *text.held_out.values())) < 1.01 * TEXT
    assert not [name for name in text.learned if "translations" in name]
    less = documents.read(manuals, most_bytes=TEXT // 2)
    assert less.learned.items() <= text.learned.items()
    assert less.held_out.items() <= text.held_out.items()


def test_byte_pairs_are_learned_from_the_training_files_alone(manuals: dict[str, documents.Source]) -> None:
    text = documents.read(manuals, most_bytes=TEXT)
    learned, _ = documents.tokens(text)
    assert 300 < int(learned.max()) < documents.SYMBOLS
    other = documents.Documentation(text.learned, {"one": "@@@@" * 100_000})
    again, held_out = documents.tokens(other)
    assert torch.equal(again, learned)
    assert len(held_out) > 100_000, "a pair that only the test has was learned"


def test_other_documentation_is_another_task_and_refused(manuals: dict[str, documents.Source]) -> None:
    text = documents.read(manuals, most_bytes=TEXT // 4)
    with pytest.raises(ConfigError, match=r"apt-get install linux-doc-6.1=6.1.192-1 perl-doc=.*snapshot"):
        documents.learnable(text, "0" * 64, "0" * 64)
    with pytest.raises(ConfigError, match="other byte pairs"):
        documents.learnable(text, text.sha256, "0" * 64)


def test_no_setting_is_chosen_on_the_held_out_task() -> None:
    assert "documentation" not in task_names("all")
    assert task_names("documentation") == ["documentation"]
