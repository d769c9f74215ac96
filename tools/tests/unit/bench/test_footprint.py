"""`bench memory` on real ranks: it sees residuals, and a scheme that hoards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradsieve.errors import ConfigError
from gradsieve_tools.bench import footprint
from gradsieve_tools.cli.main import main

PARAMS = 4 * 2048**2
"""64 MB: large beside what two processes differ in anyway."""


@pytest.mark.nightly
def test_the_command_sees_residuals_and_what_a_step_needs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "memory.json"
    arguments = ["--schemes", "exdyna", "--params", str(PARAMS), "--density", "0.001"]
    assert main(["bench", "memory", *arguments, "--json", str(out)]) == 0
    assert "added_n" in capfd.readouterr().out
    rows = {row["optimizer"]: row for row in json.loads(out.read_text())["rows"]}
    assert all((row["params"], row["world"]) == (PARAMS, 2) for row in rows.values())
    # Measured 6.1; what numba needs to compile where it has no cache yet is up to 2 more of these 64 MB.
    assert 2.0 < rows["SGD"]["added_n"] < 8.0
    assert rows["AdamW"]["added_n"] > 3.0
    assert all(row["peak_mb"] > row["before_mb"] > PARAMS * 4 / 2**20 for row in rows.values())


def test_a_model_that_does_not_fit_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"GiB"):
        footprint.measure("exdyna", "SGD", 2, 10**12, 0.001)
