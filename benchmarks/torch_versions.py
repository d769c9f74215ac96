"""With which versions of torch and Python gradsieve works: each in a fresh environment, from the wheel.

    python benchmarks/torch_versions.py 2.7.0:3.10 2.13.0:3.11 2.15.0:3.13 \
        --json benchmarks/results/torch-versions-DATE.json

For each pair a virtual environment is made, torch and the wheel of this tree are installed into it, and tests
run against the wheel. torch comes from the index of CPU builds where that can be reached, otherwise from
PyPI, with some 5 GB of CUDA. `--folder` keeps the environments, and takes those that are there. The file is
written after every pair.

columns:
  state      tested; imported only: the tests did not run; refused: it was not installed or not imported
  lacks      private names of torch that are missing (src/gradsieve/torch_names.py)
  seconds    of the tests alone
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from gradsieve.errors import ConfigError
from gradsieve_tools import results
from gradsieve_tools.cli.progress_bar import progress

ROOT = Path(__file__).parents[1]
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
EXTRAS = "cli,completion,cpu,plot"
FOR_TESTS = ("hypothesis>=6.100", "pytest>=8", "pytest-timeout>=2.3")
TESTS = ("tests/unit", "tests/multiproc/test_attach.py", "tests/multiproc/test_hsdp.py")
"""The last two train on two and four real ranks."""
COLUMNS = ["torch", "python", "state", "passed", "failed", "skipped", "lacks", "seconds"]
LOOK = """
import json, platform, torch, gradsieve
from gradsieve.torch_names import lacking
gradsieve.attach, gradsieve.schemes.SCHEMES
versions = {"build": torch.__version__, "python": platform.python_version()}
print(json.dumps({**versions, "lacks": [str(each) for each in lacking()]}))
"""


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    results.writable(args.json)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="torch-versions-") as made, progress(len(args.pairs)) as advance:
        folder = args.folder or Path(made)
        wheel = _wheel(Path(made))
        for torch, python in args.pairs:
            rows.append(_try(torch, python, folder, wheel, args.tests))
            advance(1, f"torch {torch} on Python {python}: {rows[-1]['state']}")
            if args.json is not None:
                results.write(args.json, {"tests": list(args.tests), "extras": EXTRAS}, rows)
    print(results.table([{**row, "lacks": len(row["lacks"])} for row in rows], COLUMNS))
    for row in rows:
        for reason in row["reasons"]:
            print(f"torch {row['torch']}, Python {row['python']}: {reason}")
    return int(any(row["state"] != "tested" or row["failed"] for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pairs", nargs="+", type=_pair, metavar="TORCH:PYTHON", help="e.g. 2.7.0:3.10")
    parser.add_argument(
        "--tests", nargs="+", default=TESTS, metavar="FILE", help=f"default: {' '.join(TESTS)}"
    )
    parser.add_argument("--folder", type=Path, metavar="FOLDER", help="keep the environments there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    return parser


def _pair(text: str) -> tuple[str, str]:
    torch, colon, python = text.partition(":")
    if not colon or not all(part.isdigit() for part in f"{torch}.{python}".split(".")):
        raise argparse.ArgumentTypeError(f"{text!r} is not TORCH:PYTHON, such as 2.7.0:3.10")
    return torch, python


def _wheel(folder: Path) -> Path:
    _run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder), str(ROOT)])
    (wheel,) = folder.glob("*.whl")
    return wheel


def _try(torch: str, python: str, folder: Path, wheel: Path, tests: Sequence[str]) -> dict[str, Any]:
    row: dict[str, Any] = {"torch": torch, "python": python, "state": "refused", "lacks": [], "reasons": []}
    row |= dict.fromkeys(("passed", "failed", "skipped", "seconds"))
    here = folder / f"torch-{torch}-python-{python}"
    interpreter = str(here / "bin" / "python")
    try:
        _install(torch, python, here, wheel)
        row |= json.loads(_run([interpreter, "-c", LOOK], cwd=folder))
        row |= {"state": "imported only"}
        row |= _tested(interpreter, here / "tests.xml", tests)
    except ConfigError as error:
        row["reasons"].append(str(error))
    return row


def _install(torch: str, python: str, here: Path, wheel: Path) -> None:
    interpreter = str(here / "bin" / "python")
    pip = [interpreter, "-m", "pip", "install", "--quiet"]
    if not (here / "ready").exists():
        _run([_interpreter(python), "-m", "venv", str(here)])
        index = ["--index-url", CPU_BUILDS, "--extra-index-url", "https://pypi.org/simple"]
        _run([*pip, f"torch=={torch}", *(index if _can_reach(CPU_BUILDS) else [])])
        _run([*pip, f"torch=={torch}", f"gradsieve[{EXTRAS}] @ {wheel.as_uri()}", *FOR_TESTS])
        (here / "ready").touch()
    _run([*pip, "--no-deps", "--force-reinstall", str(wheel)])  # one of the same version may be there


def _interpreter(version: str) -> str:
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}*/bin/python"))
    found = str(pyenv[-1]) if pyenv else shutil.which(f"python{version}")
    if found is None:
        raise ConfigError(f"there is no Python {version} here")
    return found


def _can_reach(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/", timeout=10):  # noqa: S310 - a constant above
            return True
    except (urllib.error.URLError, OSError):
        return False


def _tested(interpreter: str, report: Path, tests: Sequence[str]) -> dict[str, Any]:
    """Against the wheel: the tree's own `src` is not on the path."""
    report.unlink(missing_ok=True)
    argv = [interpreter, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", *tests]
    done = subprocess.run(argv, cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode not in (0, 1) or not report.is_file():
        raise ConfigError(f"pytest ended with {done.returncode}: {done.stdout.strip()[-400:]}")
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")  # noqa: S314 - pytest wrote it just now
    count = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    return {
        "state": "tested",
        "passed": count["tests"] - failed - count["skipped"],
        "failed": failed,
        "skipped": count["skipped"],
        "seconds": round(float(suite.get("time", "0"))),
        "reasons": [
            f"{case.get('classname')}::{case.get('name')}"
            for case in suite.iter("testcase")
            if case.find("failure") is not None or case.find("error") is not None
        ],
    }


def _environment() -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**ours, "OMP_NUM_THREADS": "1"}


def _run(argv: Sequence[str], cwd: Path = ROOT) -> str:
    done = subprocess.run(argv, cwd=cwd, env=_environment(), capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        told = (done.stderr or done.stdout).strip().splitlines()
        raise ConfigError(f"{' '.join(argv[:6])} ...: {' '.join(told[-3:])}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
