"""Checkpoints in a folder: they resume bit for bit, load on all ranks or on none, and break without harm."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from gradsieve import Gradients, MismatchError, Steps
from gradsieve.checkpoint import fencing, files
from gradsieve.checkpoint import state as saving
from gradsieve.errors import Malformed
from laws import crew as laws_crew
from laws.crew import ELEMENTS, Crew, Hand, adamw, fake_group, sgd  # noqa: F401  # a fixture

EXDYNA: dict[str, Any] = {"scheme": "exdyna", "density": 0.1}


def differing(crew: Crew, before: list[dict[str, Tensor]]) -> list[str]:
    """Where ranks do not hold the bits that they held."""
    out = []
    for hand, held in zip(crew.hands, before, strict=True):
        now = hand.all()
        out += [name for name in {*now, *held} if name not in now or name not in held]
        out += [name for name in now if name in held and not torch.equal(now[name], held[name])]
    return out


def save(crew: Crew, folder: Path, **settings: Any) -> None:
    crew.everyone(lambda hand: hand.sync.save(folder, **settings))


def load(crew: Crew, folder: Path, **settings: Any) -> None:
    crew.everyone(lambda hand: hand.sync.load(folder, **settings))


def snapshots(crew: Crew) -> list[dict[str, Tensor]]:
    return [hand.all() for hand in crew.hands]


# -- resume ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        (adamw, {"bits": 0.8}),
        (sgd, EXDYNA),
        (sgd, {"bits": 0.8, "dtype": torch.bfloat16}),
        (adamw, {"bits": 0.8, "exchange": Steps(every=2)}),
        (sgd, {**EXDYNA, "exchange": Gradients()}),
    ],
    ids=["adamw", "exdyna", "bfloat16", "every", "gradients"],
)
def test_a_resumed_training_goes_on_bit_for_bit(optimizer: Any, settings: Any, tmp_path: Path) -> None:
    """In syncs that have made steps of their own, loaded twice."""
    with Crew(2, optimizer, **settings) as crew, Crew(2, optimizer, **settings) as later:
        save(crew.train(0, 3), tmp_path)
        models = [{k: v.clone() for k, v in hand.model.state_dict().items()} for hand in crew.hands]
        whole = snapshots(crew.train(3, 6))
        later.train(90, 92)
        for hand in later.hands:
            hand.model.load_state_dict(models[hand.rank])
        load(later, tmp_path)
        load(later, tmp_path)
        assert differing(later.train(3, 6), whole) == []


class Images(nn.Module):
    """Whose parameters do not lie in memory in the order of their indices."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(5)
        for name, shape in {"first": (8, 4, 3, 3), "last": (16, 12)}.items():
            start = torch.randint(-8, 9, shape, generator=source) / 8
            self.register_parameter(name, nn.Parameter(start.to(dtype)))
        self.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("laid_out", [True, False], ids=["", "twin"])
def test_moments_lie_in_memory_as_their_parameters_do(
    laid_out: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else own noise would not be found in them, and the training would go on otherwise."""
    monkeypatch.setattr(laws_crew, "Small", Images)
    if not laid_out:
        monkeypatch.setattr(saving, "_lay_out", lambda *_: None)
    with Crew(2, adamw, bits=0.8) as crew, Crew(2, adamw, bits=0.8) as later:
        crew.train(0, 8).everyone(lambda hand: hand.sync.save(tmp_path))
        later.everyone(lambda hand: hand.sync.load(tmp_path))
        now = crew.train(8, 20).hands
        assert (differing(later.train(8, 20), [hand.all() for hand in now]) == []) is laid_out


def test_without_the_optimizers_it_does_not(tmp_path: Path) -> None:
    """Twin."""
    with Crew(2, adamw, bits=0.8) as crew, Crew(2, adamw, bits=0.8) as later:
        save(crew.train(0, 3), tmp_path, optimizers=False)
        whole = snapshots(crew.train(3, 6))
        load(later, tmp_path, optimizers=False)
        assert any(name.startswith("parameter/") for name in differing(later.train(3, 6), whole))
        assert "has no optimizers" in str(later.errors(lambda hand: hand.sync.load(tmp_path))[0])


def test_another_number_of_ranks_takes_over_what_waits_and_optimizers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Crew(2, adamw, bits=0.8) as crew, Crew(3, adamw, bits=0.8) as more:
        save(crew.train(0, 3), tmp_path)
        load(more, tmp_path)
        torch.testing.assert_close(more.waits(), crew.waits(), rtol=1e-5, atol=1e-6)
        for hand in more.hands:
            old = crew.hands[hand.rank % 2].optimizer.state_dict()["state"]
            new = hand.optimizer.state_dict()["state"]
            assert all(torch.equal(old[number]["exp_avg"], new[number]["exp_avg"]) for number in old)
        more.train(3, 5).everyone(lambda hand: hand.sync.verify())
    said = [record.getMessage() for record in caplog.records if "was loaded on" in record.getMessage()]
    assert len(said) == 1
    assert "a checkpoint of 2 ranks was loaded on 3" in said[0]
    assert "rank r took the optimizer of old rank r mod 2" in said[0]


def test_a_distributed_checkpoint_as_one_file_loads_on_another_number_of_ranks(tmp_path: Path) -> None:
    with Crew(4, bits=0.8) as crew, Crew(3, bits=0.8) as fewer:
        dcp.save({"sync": crew.train(0, 3).states()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
        dcp_to_torch_save(tmp_path / "dcp", tmp_path / "all.pt")
        fewer.load(torch.load(tmp_path / "all.pt", weights_only=True)["sync"])
        torch.testing.assert_close(fewer.waits(), crew.waits(), rtol=1e-5, atol=1e-6)


def elements(hand: Hand, optimizers: bool) -> int:
    """Of vectors, but for the few gradients that the next exchange tells."""
    parts = saving.shard_of(hand.sync.replica, optimizers)
    vectors = [p for key, p in parts.items() if p.dtype == torch.float32 and p.dim() and "/noted/" not in key]
    return sum(part.numel() for part in vectors)


@pytest.mark.parametrize(
    ("preset", "before", "after"),
    [(Steps(), 3, 1), (Gradients(small=0), 1, 0)],
    ids=["steps", "gradients"],
)
def test_after_a_flush_only_what_a_flushed_run_needs_is_saved(
    preset: Steps | Gradients, before: int, after: int, tmp_path: Path
) -> None:
    def vectors(crew: Crew) -> float:
        return elements(crew.hands[0], optimizers=False) / ELEMENTS

    with Crew(2, **EXDYNA, exchange=preset) as crew, Crew(2, **EXDYNA, exchange=preset) as later:
        assert vectors(crew.train(0, 3)) == before
        crew.everyone(lambda hand: hand.sync.flush())
        assert vectors(crew) == after
        save(crew, tmp_path)
        load(later, tmp_path)
        flushed = [hand.sync.state_dict() for hand in crew.hands]
        for hand, state in zip(later.hands, flushed, strict=True):
            assert all(torch.equal(part, state[key]) for key, part in hand.sync.state_dict().items())


# -- refusals -------------------------------------------------------------------------------------------


def the_manifest(folder: Path) -> Path:
    return folder / fencing.manifests(folder)[0].manifest


def manifest(folder: Path) -> dict[str, Any]:
    return dict(json.loads(the_manifest(folder).read_text()))


def file_of(folder: Path, rank: int, sha256: str) -> str:
    return f"rank{rank:05}-shard00000-{fencing.manifests(folder)[0]}-{sha256[:16]}.safetensors"


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("rank*.safetensors"))


def edit(folder: Path, old: str, new: str) -> None:
    path = the_manifest(folder)
    text = path.read_text()
    assert re.search(old, text)
    path.write_text(re.sub(old, new, text, count=1))


def tampered(folder: Path) -> None:
    content = bytearray(shards(folder)[1].read_bytes())
    content[-5] ^= 4
    shards(folder)[1].write_bytes(content)


def truncated(folder: Path) -> None:
    os.truncate(shards(folder)[1], 900)


def missing(folder: Path) -> None:
    shards(folder)[1].unlink()


def a_link(folder: Path) -> None:
    path = shards(folder)[1]
    path.rename(folder / "elsewhere")
    path.symlink_to(folder / "elsewhere")


def hashes(folder: Path) -> list[str]:
    return [each.split()[1] for each in manifest(folder)["files"]]


def a_folder_in_its_place(folder: Path) -> None:
    shards(folder)[1].unlink()
    (folder / file_of(folder, 1, hashes(folder)[1])).mkdir()


def swapped(folder: Path) -> None:
    """With a manifest and names to match: what is inside says whose it is."""
    first, second = hashes(folder)
    for path, rank, sha in zip(shards(folder), (1, 0), (first, second), strict=True):
        path.rename(folder / file_of(folder, rank, sha))
    edit(folder, r'"(\d+ \w{64})",\s+"(\d+ \w{64})"', r'"\2",\n  "\1"')


def one_for_all(folder: Path) -> None:
    """Rank 0's, under the name of rank 1."""
    shutil.copy(shards(folder)[0], folder / file_of(folder, 1, hashes(folder)[0]))
    edit(folder, r'"(\d+ \w{64})",\s+"(\d+ \w{64})"', r'"\1",\n  "\1"')


def no_manifest(folder: Path) -> None:
    for path in folder.glob("manifest*"):
        path.unlink()


def a_linked_manifest(folder: Path) -> None:
    path = the_manifest(folder)
    path.rename(folder / "other.json")
    path.symlink_to(folder / "other.json")


def a_pipe_for_a_manifest(folder: Path) -> None:
    path = the_manifest(folder)
    path.unlink()
    os.mkfifo(path)


def under_a_later_name(folder: Path) -> None:
    shutil.copy(the_manifest(folder), folder / "manifest-7.1.json")


def grown(folder: Path) -> None:
    """To more than this machine has memory: it is refused by its size, before anything is read."""
    os.truncate(shards(folder)[1], 1 << 42)


def of_another_version(folder: Path) -> None:
    edit(folder, '"version": 3', '"version": 2')


def of_another_scheme(folder: Path) -> None:
    edit(folder, "ExDyna", "Dense")


def of_another_model(folder: Path) -> None:
    edit(folder, '"model": "....', '"model": "0123')


def of_another_step(folder: Path) -> None:
    edit(folder, r'"step": \d+', '"step": 77')


def with_a_path(folder: Path) -> None:
    edit(folder, r"(\d) \w{16}(\w{48})", r"\1 ../../../../../etc\2")


def with_a_bomb(folder: Path) -> None:
    edit(folder, '"world": 2', '"world": 999999')


def with_a_longer_bomb(folder: Path) -> None:
    edit(folder, '"world": 2', '"world": 999999999999')


def with_too_few_files(folder: Path) -> None:
    edit(folder, '"world": 2', '"world": 3')


def with_one_more_key(folder: Path) -> None:
    edit(folder, "{\n", '{\n "run": "this",\n')


def with_a_key_twice(folder: Path) -> None:
    edit(folder, "{\n", '{\n "step": 3,\n')


def with_a_step_that_is_no_number(folder: Path) -> None:
    edit(folder, r'"step": \d+', '"step": NaN')


def with_a_step_that_is_a_truth(folder: Path) -> None:
    edit(folder, r'"step": \d+', '"step": true')


def with_more_behind(folder: Path) -> None:
    edit(folder, r"\]\n\}", "],\n [[]]}")


def with_a_deep_nest(folder: Path) -> None:
    edit(folder, r'"pair": ""', f'"pair": {"[" * 900}')


REFUSALS: dict[Callable[[Path], None], str] = {
    tampered: "rank 1 refused: .*is not what was saved",
    truncated: "rank 1 refused: .*is not what was saved",
    missing: "rank 1 refused: .*cannot be read: No such file",
    a_link: "rank 1 refused: .*cannot be read: Too many levels of symbolic links",
    a_folder_in_its_place: "rank 1 refused: .*cannot be read: Is a directory",
    swapped: "has no 'rank0/format'; was it saved by another rank",
    one_for_all: "rank 1 refused: .*has no 'rank1/format'; was it saved by another rank",
    grown: "rank 1 refused: .*it has 4398046511104 bytes, the manifest says",
    under_a_later_name: "is the manifest 1.1 under another name",
    no_manifest: "manifest.json cannot be read: No such file",
    a_linked_manifest: "manifest-1.1.json cannot be read: Too many levels",
    a_pipe_for_a_manifest: "manifest-1.1.json is not a file of a checkpoint",
    of_another_version: "is of version 2; this gradsieve reads version 3",
    of_another_scheme: "is of scheme Dense, this run's is ExDyna",
    of_another_model: "of another model",
    of_another_step: "is of step 3, not 77",
    with_a_path: "does not name a file for each of 2 ranks",
    with_a_bomb: "does not name a file for each of 999999 ranks",
    with_a_longer_bomb: "does not name a file for each of 999999999999 ranks",
    with_too_few_files: "does not name a file for each of 3 ranks",
    with_one_more_key: "is not a manifest",
    with_a_key_twice: "is not a manifest",
    with_a_step_that_is_no_number: "is not a manifest",
    with_a_step_that_is_a_truth: "is not a manifest",
    with_a_deep_nest: "is not a manifest",
    with_more_behind: "is not a manifest",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    with Crew(2, **EXDYNA) as crew:
        save(crew.train(0, 3), folder)
    return folder


@pytest.fixture(scope="module")
def another() -> Iterator[Crew]:
    """Ranks with something to lose."""
    with Crew(2, **EXDYNA) as crew:
        yield crew.train(7, 9)


@pytest.mark.parametrize("spoil", REFUSALS, ids=lambda spoil: spoil.__name__)
def test_what_is_not_this_checkpoint_is_refused_on_all_ranks_and_changes_nothing(
    spoil: Callable[[Path], None], saved: Path, another: Crew, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    spoil(folder)
    before = snapshots(another)
    errors = another.errors(lambda hand: hand.sync.load(folder))
    assert all(isinstance(error, Malformed | MismatchError) for error in errors), errors
    assert re.search(REFUSALS[spoil], str(errors[0])), errors[0]
    assert "rank 0, step 2: nothing was loaded on any rank" in str(errors[0])
    assert differing(another, before) == []


def test_the_same_unspoilt_is_loaded(saved: Path) -> None:
    """Twin."""
    with Crew(2, **EXDYNA) as crew:
        load(crew, saved)
        assert all(hand.sync.pipeline.step == 3 for hand in crew.hands)


def test_an_optimizer_of_another_kind_is_refused_and_all_keep_theirs(saved: Path) -> None:

    def in_two_groups(parameters: Any) -> torch.optim.Optimizer:
        first, *others = parameters
        return torch.optim.SGD([{"params": [first]}, {"params": others}], lr=0.1, momentum=0.5)

    with Crew(2, in_two_groups, **EXDYNA) as crew:
        before = snapshots(crew.train(0, 2))
        first, _ = crew.errors(lambda hand: hand.sync.load(saved))
        assert "optimizer 0 in the checkpoint is no SGD, or has other parameters or groups" in str(first)
        assert differing(crew, before) == []


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    first, second, third = parameters
    return torch.optim.SGD([{"params": [second]}, {"params": [first, third]}], lr=2.0**-4, momentum=0.5)


@pytest.mark.parametrize(
    "other",
    [
        lambda parameters: sgd([*parameters][::-1]),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
        lambda parameters: torch.optim.RMSprop(parameters, lr=0.1, momentum=0.5),
        two_groups,
    ],
    ids=["another order", "Adagrad", "RMSprop", "other groups"],
)
def test_moments_go_to_the_parameters_and_the_optimizer_that_they_are_of(other: Any, saved: Path) -> None:
    with Crew(2, other, **EXDYNA) as crew:
        before = snapshots(crew.train(0, 2))
        for error in crew.errors(lambda hand: hand.sync.load(saved)):
            assert "optimizer 0 in the checkpoint is no" in str(error)
        assert differing(crew, before) == []


def with_tensors(folder: Path, **changed: Tensor) -> int:
    """Rank 0's file with these in it, and a manifest that says so; its length."""
    about, old = files.read_manifest(folder), shards(folder)[0]
    tensors = files.tensors_in(bytearray(old.read_bytes()))
    tensors |= {f"rank0/{name.replace('__', '/')}": tensor for name, tensor in changed.items()}
    content = b"".join(files.pieces(tensors))
    listed = f"{len(content)} {hashlib.sha256(content).hexdigest()}", *about.files[1:]
    forged = dataclasses.replace(about, files=listed)
    (folder / forged.file_of(0)).write_bytes(content)
    the_manifest(folder).write_text(files.as_text(forged))
    return len(content)


def as_tensor(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


HOSTILE = {
    "a title": {"scheme": as_tensor("\x1b]0;title\x07\x1b[31mred")},
    "a long name": {"scheme": torch.full((1 << 20,), 65, dtype=torch.uint8)},
    "a kind": {"optimizer__0__text": as_tensor('{"\\u001b[31mkind": [1]}')},
    "parts": {
        "optimizer__0__text": as_tensor(
            '{"dict":[["class","SGD"],["parameters",[["first","bias","last"]]],["state",{"dict":[[0,'
            '{"dict":[["m",{"parts":[["\\u001b]0;title","x"]]}]]}]]}],["param_groups",[]]]}'
        )
    },
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_a_file_says_neither_fills_a_log_nor_commands_a_terminal(
    what: str, saved: Path, another: Crew, tmp_path: Path
) -> None:
    shutil.copytree(saved, tmp_path / "copy")
    with_tensors(tmp_path / "copy", **HOSTILE[what])
    for error in another.errors(lambda hand: hand.sync.load(tmp_path / "copy")):
        assert isinstance(error, Malformed)
        assert str(error).isprintable()
        assert len(str(error)) < 1000


@pytest.mark.parametrize("filler", ["[1,", '"1 a",', "[],", "{"])
def test_a_manifest_takes_no_memory_but_its_own(filler: str, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "copy")
    long = f'"files": [{filler * ((2 << 20) // len(filler))}'
    edit(tmp_path / "copy", r'"files": \[', long)
    tracemalloc.start()
    with pytest.raises(Malformed):
        files.read_manifest(tmp_path / "copy")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * (2 << 20) + (1 << 20)


# -- what breaks ----------------------------------------------------------------------------------------


def test_a_save_that_fails_on_one_rank_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Crew(2, **EXDYNA) as crew, Crew(2, **EXDYNA) as later:
        save(crew.train(0, 3), tmp_path)
        before, there = snapshots(crew), sorted(os.listdir(tmp_path))
        write = files.write

        def failing(folder: Path, part: str, *rest: Any) -> list[int]:
            if part.startswith("rank00001"):
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(folder, part, *rest)

        monkeypatch.setattr(files, "write", failing)
        first, second = crew.train(3, 5).errors(lambda hand: hand.sync.save(tmp_path))
        assert "nothing was saved; the checkpoint before is as it was" in str(first)
        assert "rank 1 refused: OSError: [Errno 28] No space left on device" in str(first)
        assert isinstance(second, Malformed)
        assert sorted(os.listdir(tmp_path)) == there
        load(later, tmp_path)
        assert differing(later, before) == []


def fill(path: Path) -> None:
    """All that is left of the disk."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as stream:
        while True:
            stream.write(bytes(4096))


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        with Crew(2, adamw, **EXDYNA) as crew, Crew(2, adamw, **EXDYNA) as later:
            save(crew.train(0, 3), disk)
            before = snapshots(crew)
            fill(disk / "film")
            errors = crew.train(3, 5).errors(lambda hand: hand.sync.save(disk))
            assert all("No space left on device" in str(error) for error in errors)
            load(later, disk)
            assert differing(later, before) == []
            (disk / "film").unlink()
            save(crew, disk)
            load(later, disk)
            assert later.hands[0].sync.pipeline.step == 5
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_save_removes_what_older_ones_left_and_nothing_else(tmp_path: Path) -> None:
    """Also of one that broke off."""
    (tmp_path / "rank00000-shard00000-0.7.part").write_bytes(b"half")
    (tmp_path / f"rank00005-shard00000-0.7-{'0' * 16}.safetensors").write_bytes(b"of a save that broke off")
    (tmp_path / "model.safetensors").write_bytes(b"somebody else's")
    with Crew(2, **EXDYNA) as crew:
        save(crew.train(0, 2), tmp_path)
        first = shards(tmp_path)
        save(crew.train(2, 3), tmp_path)
    assert len(first) == len(shards(tmp_path)) == 2
    assert not set(first) & set(shards(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir() if path not in shards(tmp_path)) == [
        "manifest-1.2.json",
        "manifest.json",
        "model.safetensors",
        "term-1",
    ]


def test_a_link_in_the_way_of_a_save_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "rank00000-shard00000-1.1.part").symlink_to(tmp_path / "mine")
    with Crew(2, **EXDYNA) as crew:
        save(crew, tmp_path / "in")
    assert (tmp_path / "mine").read_text() == "mine"
