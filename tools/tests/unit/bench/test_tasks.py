"""The training tasks: what they learn from, and that they learn."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gradsieve.errors import ConfigError
from gradsieve_tools.bench.common.models import sources
from gradsieve_tools.bench.tasks import documentation as documents
from gradsieve_tools.bench.tasks.data import ITEMS, Data, DataSet, apart, fashion_mnist, ratings, source_text
from gradsieve_tools.bench.tasks.training import TASKS, Training, batches, build, rate_at, shards
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


def weights(training: Training) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in training.model.parameters()])


@every_task
def test_a_seed_makes_a_model_and_leaves_the_callers_numbers_alone(name: str) -> None:
    before = torch.get_rng_state()
    first, second, other = build(name, 1), build(name, 1), build(name, 2)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(weights(first), weights(second))
    assert not torch.equal(weights(first), weights(other))


@every_task
def test_a_task_is_of_the_size_it_is_meant_to_be(name: str) -> None:
    training = build(name, 0)
    least, most = (1_000_000, 1_100_000) if TASKS[name].held_out else (200_000, 700_000)
    assert least < training.n < most
    assert training.batch % 16 == 0
    assert training.steps >= 2000


def test_most_of_the_recommender_are_tables() -> None:
    model = build("recommender", 0).model
    tables = sum(part.weight.numel() for part in model.modules() if isinstance(part, torch.nn.Embedding))
    assert tables > 0.95 * sum(parameter.numel() for parameter in model.parameters())


@every_task
def test_a_few_steps_lower_the_loss(name: str) -> None:
    training = build(name, 0, steps=12)
    feed = batches(torch.arange(len(training.train)), training.batch, seed=0)
    same = training.train.take(next(feed))  # one batch again and again: chance has no say

    losses = []
    for _ in range(training.steps):
        training.optimizer.zero_grad()
        loss = training.loss(training.model(*same.inputs), same.target)
        loss.backward()
        training.optimizer.step()
        training.schedule.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]


@every_task
def test_the_metric_is_that_of_all_test_examples_and_the_model_trains_on(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "gradsieve_tools.bench.tasks.training._EVALUATED_AT_ONCE", 7
    )  # the last part is a smaller one
    training = build(name, 0)
    value = training.evaluate()
    assert training.model.training
    training.model.eval()
    with torch.no_grad():
        answer = training.model(*training.test.inputs)
    if training.metric == "accuracy":
        answer = (answer.argmax(1) == training.test.target).float().mean()
    else:
        answer = training.loss(answer, training.test.target)
    assert value == pytest.approx(answer.item(), rel=1e-4)


@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "apart"])
@pytest.mark.parametrize("world", [1, 3, 16])
@every_task
def test_shards_are_all_examples_each_once(name: str, world: int, mixed: bool) -> None:
    training = build(name, 0)
    owned = shards(training, world, mixed)
    assert len(owned) == world
    assert torch.cat(owned).sort().values.tolist() == list(range(len(training.train)))
    assert max(map(len, owned)) - min(map(len, owned)) <= 1


def spread(values: Tensor, owned: list[Tensor]) -> float:
    """How far the shards' histograms of `values` are from everybody's: 0 the same, 1 nothing in common."""
    bins = values * 10 // (values.max() + 1)
    parts = torch.stack([bins[shard].bincount(minlength=10) / len(shard) for shard in owned])
    return ((parts - parts.mean(0)).abs().sum(1) / 2).mean().item()


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("mlp", lambda train: train.target),
        ("cnn", lambda train: train.target),
        ("transformer", lambda train: torch.arange(len(train))),
        ("lstm", lambda train: torch.arange(len(train))),
        ("documentation", lambda train: torch.arange(len(train))),
        ("recommender", lambda train: train.inputs[0]),
    ],
)
def test_ranks_see_the_same_when_mixed_and_something_else_each_when_not(
    name: str, what: Callable[[Data], Tensor]
) -> None:
    training = build(name, 0)
    values = what(training.train)
    assert spread(values, shards(training, 4)) < 0.2
    assert spread(values, shards(training, 4, mixed=False)) > 0.5


def test_batches_go_through_all_of_a_shard_before_they_repeat() -> None:
    shard = torch.arange(100, 130)
    drawn = torch.cat(list(islice(batches(shard, 8, seed=0), 15)))
    rounds = drawn.view(4, 30)  # a batch may end one round and begin the next
    assert all(torch.equal(each.sort().values, shard) for each in rounds)
    assert not torch.equal(rounds[0], rounds[1])

    again, other = (torch.cat(list(islice(batches(shard, 8, seed), 15))) for seed in (0, 1))
    assert torch.equal(drawn, again)
    assert not torch.equal(drawn, other)


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


def test_without_documentation_the_command_is_named(tmp_path: Path) -> None:
    missing = {"perl-doc": documents.Source("5", tmp_path, "*.pod")}
    with pytest.raises(ConfigError, match="to install it: apt-get install perl-doc=5"):
        documents.read(missing)


def test_no_setting_is_chosen_on_the_held_out_task() -> None:
    assert "documentation" not in task_names("all")
    assert task_names("documentation") == ["documentation"]


def test_a_pair_is_rated_once_in_training_or_in_the_test() -> None:
    data = ratings(drawn=20_000, tested=500)
    pairs = torch.cat([part.inputs[0] * ITEMS + part.inputs[1] for part in (data.train, data.test)])
    assert len(pairs.unique()) == len(pairs)
    assert len(data.test) == 500


def test_a_few_users_and_items_have_most_of_the_ratings() -> None:
    for numbers in ratings(drawn=20_000, tested=500).train.inputs:
        counts = numbers.bincount(minlength=ITEMS)
        assert counts[:500].sum() > 0.4 * counts.sum()
        assert counts[0] > 20 * counts.double().mean()


def test_the_learning_rate_rises_in_a_line_and_falls_nearly_to_zero() -> None:
    parts = [rate_at(step, 100) for step in range(100)]
    assert parts[:5] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6])
    assert parts[5] == 1
    assert parts[5:] == sorted(parts[5:], reverse=True)
    assert 0 < parts[-1] < 1e-3


def test_fewer_steps_shorten_the_schedule() -> None:
    training = build("mlp", 0, steps=10)
    assert training.steps == 10
    highest = training.optimizer.param_groups[0]["initial_lr"]
    for _ in range(10):
        training.optimizer.step()
        training.schedule.step()
    assert training.schedule.get_last_lr()[0] < 1e-3 * highest


def test_images_keep_their_labels(images: Path) -> None:
    data = fashion_mnist(images)
    assert (len(data.train), len(data.test)) == (IMAGES["train"], IMAGES["t10k"])
    brightness = data.test.inputs[0].mean((1, 2, 3)) * 0.353 + 0.286
    assert torch.equal(((brightness * 255 - 9.5) / 20).round().long(), data.test.target)


def test_an_unknown_task_names_the_others() -> None:
    with pytest.raises(ConfigError, match="no task 'vit'; choose from mlp, cnn, transformer"):
        build("vit", 0)
