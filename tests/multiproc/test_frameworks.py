"""The same training by hand, by Accelerate, by Lightning and by transformers' Trainer; saved by each of them,
gone on from in new processes, and what they saved used without gradsieve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from multiproc.frameworks import STEPS, ends

NAMES = ("plain", "accelerate", "lightning", "trainer")
DATA = Path("/usr/share/datasets/fashion-mnist")
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=f"{DATA} is missing: see examples")
nightly = pytest.mark.nightly  # all frameworks are imported, and run once for all of these tests


def of(name: str) -> list[dict[str, Any]]:
    return ends()[0][name]


def test_accelerate_ends_and_goes_on_as_the_loop_by_hand() -> None:
    """Slow: Accelerate is imported, and two trainings are resumed in new processes."""
    whole, resumed = ends("plain", "with_accelerate")
    trained = [*whole["plain"], *whole["accelerate"]]
    assert len({end["bits"] for end in trained}) == 1
    assert [end["exchanges"] for end in trained] == [STEPS + 1] * 4  # and the flush at the end
    assert [end["bits"] for end in resumed["accelerate"]] == [trained[0]["bits"]] * 2


@nightly
def test_all_frameworks_end_with_the_same_bits() -> None:
    every = [end for name in NAMES for end in of(name)]
    assert len({end["bits"] for end in every}) == 1
    assert [end["exchanges"] for end in every] == [STEPS + 1] * 8  # and the flush at the end


@nightly
@pytest.mark.parametrize("name", NAMES)
def test_gone_on_from_in_new_processes(name: str) -> None:
    assert [end["bits"] for end in ends()[1][name]] == [of("plain")[0]["bits"]] * 2
    assert of("plain")[0]["saved_bits"] != of("plain")[0]["bits"], "the twin: there were steps in between"


@nightly
def test_what_was_saved_is_the_shared_model_without_gradsieve() -> None:
    plain = of("plain")[0]
    assert of("saved")[0]["found"] == [[plain["saved_bits"], plain["saved_accuracy"]]] * 4


# -- Accelerate -----------------------------------------------------------------------------------------


@nightly
def test_a_sync_that_the_user_registers_is_refused_before_anything_is_saved() -> None:
    for end in of("registered_by_the_user"):
        where = f"ConfigError: rank {end['rank']}"
        assert end["alone"].startswith(f"{where}, step 1: register_for_checkpointing(sync) saves one rank's")
        assert "gradsieve.frameworks.accelerate.attach(accelerator, model, optimizer)" in end["alone"]
        assert "AdamW was not prepared by this accelerator" in end["unprepared"]


@nightly
def test_a_checkpoint_of_plain_ddp_is_gone_on_from() -> None:
    for end in of("of_plain_ddp"):
        assert end["same"]
        assert not end["closed"], "what is closed has nothing to save"
        said = [line for line in end["lines"] if "with empty residuals" in line]
        assert len(said) == (end["rank"] == 0)


# -- Trainer --------------------------------------------------------------------------------------------


@nightly
def test_trainer_evaluates_keeps_and_loads_the_shared_model() -> None:
    first, second = of("best_at_the_end")
    assert first["evaluated"] == second["evaluated"]
    assert len(first["evaluated"]) == 3
    assert min(first["evaluated"]) == pytest.approx(first["of the file"], rel=1e-5)
    for end in (first, second):
        assert end["is the best"]
        assert end["closed"]
        assert end["lines"] == [], "nothing was left behind"
        assert len(end["kept"]) == 1, "ours went with the checkpoints that the Trainer removed"


@nightly
def test_a_checkpoint_that_lost_our_folder_is_refused() -> None:
    for end in of("lost_folder"):
        assert end["lost"].startswith(f"RefusedError: rank {end['rank']}, step 0: nothing was loaded")
        assert "checkpoint-2/gradsieve/manifest.json cannot be read" in end["lost"]


# -- Lightning ------------------------------------------------------------------------------------------


@nightly
def test_lightning_removes_links_and_ends() -> None:
    for end in of("last_of_lightning"):
        assert end["kept"] == ["last.ckpt", "step=4.ckpt", "step=4.ckpt.gradsieve"]
        # 4 and a flush; 4 loaded, 2 and a flush; 2 and a flush from a model with empty residuals
        assert end["exchanges"] == [5, 7, 3]
        assert end["unwrapped"]
        assert end["went on"] == []
        assert any("with empty residuals" in line for line in end["after the end"]) == (end["rank"] == 0)


@nightly
def test_a_training_that_is_at_its_end_when_it_is_gone_on_from_is_flushed() -> None:
    for end in of("resumed_at_the_end"):
        assert end["something waited"], "the twin: the file lacks what the flush brought"
        assert end["lightning"]
        assert end["trainer"]
        assert end["lines"] == [], "nothing was left behind"


# -- pairs ----------------------------------------------------------------------------------------------

NOT_TOGETHER = "which was not saved together with what the framework has loaded"


@nightly
def test_accelerate_finds_what_was_saved_with_its_files_or_refuses() -> None:
    """Ours of the last two saves are there; those of the first are a twin."""
    for end in of("torn_accelerate"):
        first, *others = end["found"]
        assert others == [2, 3]
        assert NOT_TOGETHER in first
        assert "holds step 3 and step 2" in first


@nightly
def test_lightning_finds_what_was_saved_with_its_file_or_refuses() -> None:
    for end in of("torn_lightning"):
        refused, resumed = end["found"]
        assert NOT_TOGETHER in refused, "the second save was finished, and the file is of the first"
        assert resumed == 4, "two exchanges, one step more and the flush"


@nightly
def test_trainer_finds_what_was_saved_with_its_files_or_refuses() -> None:
    for end in of("torn_trainer"):
        refused, resumed = end["found"]
        assert NOT_TOGETHER in refused
        assert resumed == 7, "four exchanges, two more and the flush"
        assert end["left"] == ["checkpoint-2", "checkpoint-4"]
