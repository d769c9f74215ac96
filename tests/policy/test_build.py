"""What is released: every module and nothing else, the same bytes each time, one version everywhere."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import lock
import pytest

import gradsieve
import gradsieve_tools

ROOT = Path(__file__).parents[2]
BESIDE_THE_SOURCE = {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "SECURITY.md", "pyproject.toml"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy without caches and without git, as someone has it who unpacked an archive."""
    copy = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in BESIDE_THE_SOURCE:
        shutil.copy(ROOT / name, copy)
    return copy


def built(source: Path, out: Path) -> tuple[Path, Path]:
    argv = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl")), next(out.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def released(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return built(source, tmp_path_factory.mktemp("dist"))


def modules(source: Path) -> set[str]:
    return {str(path.relative_to(source / "src")) for path in (source / "src").rglob("*") if path.is_file()}


def test_wheel_holds_all_modules_and_nothing_else(source: Path, released: tuple[Path, Path]) -> None:
    names = set(zipfile.ZipFile(released[0]).namelist())
    own = {name for name in names if ".dist-info/" not in name}
    assert own == modules(source)
    assert "gradsieve/py.typed" in own
    assert {Path(name).name for name in names - own} == {
        "METADATA",
        "WHEEL",
        "RECORD",
        "LICENSE",
        "entry_points.txt",
    }


def test_sdist_holds_the_source_and_what_stands_beside_it(source: Path, released: tuple[Path, Path]) -> None:
    with tarfile.open(released[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names == {f"src/{name}" for name in modules(source)} | BESIDE_THE_SOURCE | {"PKG-INFO"}


def test_a_second_build_has_the_same_bytes(source: Path, released: tuple[Path, Path], tmp_path: Path) -> None:
    again = built(source, tmp_path)
    for first, second in zip(released, again, strict=True):
        assert first.name == second.name
        assert hashlib.sha256(first.read_bytes()).digest() == hashlib.sha256(second.read_bytes()).digest()


def test_one_version_everywhere(released: tuple[Path, Path]) -> None:
    assert f"version: {gradsieve.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert released[0].name == f"gradsieve-{gradsieve.__version__}-py3-none-any.whl"
    assert not re.search(r"^version *=", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert gradsieve_tools.__version__ == gradsieve.__version__
    assert f'"gradsieve=={gradsieve.__version__}"' in (ROOT / "tools" / "pyproject.toml").read_text()


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("tools")
    shutil.copytree(ROOT / "tools", copy / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    return built(copy / "tools", tmp_path_factory.mktemp("tools-dist"))[0]


def test_the_tools_are_a_wheel_of_their_own(tools: Path) -> None:
    names = zipfile.ZipFile(tools).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"gradsieve_tools"}


def test_the_command_without_the_tools_says_how_to_get_them(released: tuple[Path, Path]) -> None:
    """From the wheel, by a Python that has nothing else."""
    program = "import sys; sys.path.append(sys.argv[1]); from gradsieve.command import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, str(released[0])],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install ./tools" in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_installation_needs_torch_and_numpy_only(released: tuple[Path, Path]) -> None:
    archive = zipfile.ZipFile(released[0])
    metadata = archive.read(next(name for name in archive.namelist() if name.endswith("METADATA"))).decode()
    needed = re.findall(r"^Requires-Dist: ([a-z-]+)[^;\n]*$", metadata.replace("_", "-"), re.MULTILINE)
    assert sorted(needed) == ["numpy", "torch", "typing-extensions"]  # the last of which torch has anyway


def unpinned(workflow: str) -> list[str]:
    """Actions by a name that someone else can move, and not by a commit with its version beside it."""
    used = re.findall(r"uses: *(.+)", workflow)
    pinned = re.compile(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
    return [each for each in used if not each.startswith("./") and not pinned.fullmatch(each)]


WORKFLOWS = sorted((ROOT / ".github" / "workflows").iterdir())


def test_actions_are_pinned_by_commit() -> None:
    assert [path.stem for path in WORKFLOWS] == ["ci", "docs", "nightly", "release"]
    assert [each for path in WORKFLOWS for each in unpinned(path.read_text())] == []


LOCKED = (
    "--no-deps --require-hashes -r .ci/requirements.txt",
    "--no-index",
    "--no-deps --no-build-isolation",  # our own source, with what is installed
    f"{lock.TORCH} ",  # each index has its own builds, with CUDA or without (scripts/lock.py)
    "installed/bin/pip install dist/gradsieve-*.whl ",  # what a user gets: listed, and no part of a release
)
"""How the gate and the workflows may install packages."""


def unlocked(script: str) -> list[str]:
    lines = re.sub(r"\\\n *", "", script).splitlines()
    installs = [line.split("#")[0].strip() for line in lines if "pip install" in line.split("#")[0]]
    return [each for each in installs if not any(way in f"{each} " for way in LOCKED)]


def test_everything_that_is_installed_is_locked() -> None:
    scripts = [path.read_text() for path in [ROOT / ".ci" / "run", *WORKFLOWS]]
    assert sum(script.count("pip install") for script in scripts) >= 10
    assert [each for script in scripts for each in unlocked(script)] == []


@pytest.mark.parametrize(
    "install", ["pip install twine", "pip install torch==2.13.1", "pip install -r .ci/requirements.txt"]
)
def test_a_package_without_a_hash_is_seen(install: str) -> None:
    assert unlocked(f"      - run: {install}   # a reason\n") == [f"- run: {install}"]
