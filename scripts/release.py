"""Builds a release: wheel and sdist of both distributions in `dist/`, after every check has passed.

    python scripts/release.py v0.1.0

Nothing is built where a check fails; each failure is one line. RELEASE.md says what comes before and after.
The workflow `release.yml` runs this command on the tag.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = {
    "src/gradsieve/version.py": r'^VERSION = "(.+)"$',
    "tools/src/gradsieve_tools/__init__.py": r'^__version__ = "(.+)"$',
    "tools/pyproject.toml": r'"gradsieve==(.+?)"',
    "CITATION.cff": r"^version: (.+)$",
}
"""Where the version is written. The test of this tool holds that there is no fifth."""


def faults(root: Path, tag: str) -> list[str]:
    """Why this tree is not the release that the tag names; empty where it is."""
    if not re.fullmatch(r"v\d+\.\d+\.\d+", tag):
        return [f"a release has a tag such as v0.1.0, and not {tag}"]
    version = tag[1:]
    return [*_in_versions(root, version), *_in_changelog(root, version), *_in_git(root, tag)]


def _in_versions(root: Path, version: str) -> Iterator[str]:
    for place, pattern in PLACES.items():
        found = re.findall(pattern, (root / place).read_text(), re.MULTILINE)
        if found != [version]:
            yield f"{place} has {' and '.join(found) or 'no version'}, and not {version}"


def _in_changelog(root: Path, version: str) -> Iterator[str]:
    """What is still under another heading above it would be released without being told."""
    sections = re.split(r"^## ", (root / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    heading, _, entries = (sections or [""])[0].partition("\n")
    if not re.fullmatch(rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d", heading):
        yield f"CHANGELOG.md begins with '## {heading}', and not with '## {version} - ' and a date"
    elif not re.search(r"^- ", entries, re.MULTILINE):
        yield f"CHANGELOG.md says nothing about {version}"


def _in_git(root: Path, tag: str) -> Iterator[str]:
    if changed := _git(root, "status", "--porcelain"):
        yield f"the tree is not clean: {', '.join(line[3:] for line in changed.splitlines())}"
    tagged = _git(root, "for-each-ref", "--format=%(*objectname) %(objectname)", f"refs/tags/{tag}").split()
    if tagged and tagged[0] != (head := _git(root, "rev-parse", "HEAD").strip()):
        yield f"{tag} is the tag of {tagged[0][:12]}, and this is {head[:12]}"


def _git(root: Path, *words: str) -> str:
    command = ["/usr/bin/env", "git", "-C", str(root), *words]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def build(root: Path, version: str, out: Path) -> list[Path]:
    """The four files, which are alone in `out`."""
    shutil.rmtree(out, ignore_errors=True)
    for package in (root, root / "tools"):
        _python("build", "--no-isolation", "--outdir", str(out), str(package))
    files = sorted(out.iterdir())
    stems = [f"{name}-{version}" for name in ("gradsieve", "gradsieve_tools")]
    expected = {f"{stem}{end}" for stem in stems for end in ("-py3-none-any.whl", ".tar.gz")}
    if {file.name for file in files} != expected:
        raise SystemExit(f"built {', '.join(file.name for file in files)}, and not {sorted(expected)}")
    _python("twine", "check", "--strict", *map(str, files))
    return files


def _python(module: str, *words: str) -> None:
    """What it printed is shown where it fails."""
    command = [sys.executable, "-m", module, *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{done.stdout}\n{module} failed")


def main() -> None:
    parser = argparse.ArgumentParser(description="Check and build a release of both distributions.")
    parser.add_argument("tag", help="of the release, such as v0.1.0")
    tag = parser.parse_args().tag
    if found := faults(ROOT, tag):
        raise SystemExit("\n".join(["no release:", *(f"- {each}" for each in found)]))
    for file in build(ROOT, tag[1:], ROOT / "dist"):
        print(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  dist/{file.name}")


if __name__ == "__main__":
    main()
