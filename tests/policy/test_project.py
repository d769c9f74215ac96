"""What those who join need: owners of every part, links that lead somewhere, forms that ask for facts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from documents import links

ROOT = Path(__file__).parents[2]


def owner_faults(owners: str, roles: str) -> list[str]:
    """Lines of CODEOWNERS that name no file of ours, or a team that has no role."""
    lines = [line.split() for line in owners.splitlines() if line and not line.startswith("#")]
    gone = [path for path, *_ in lines if path != "*" and not (ROOT / path.lstrip("/")).exists()]
    strange = [f"{path} {team}" for path, *teams in lines for team in teams if f"`{team}`" not in roles]
    return gone + strange


def test_every_part_has_an_owner_with_a_role() -> None:
    owners, roles = (ROOT / ".github" / "CODEOWNERS").read_text(), (ROOT / "MAINTAINERS.md").read_text()
    assert owner_faults(owners, roles) == []
    assert set(re.findall(r"`(@\S+)`", roles)) == set(re.findall(r"@\S+", owners)), "a role without a part"


def dead_links(page: Path) -> list[str]:
    found = []
    for file, anchor in links(page):
        target = page.parent / file if file else page
        text = target.read_text() if target.suffix == ".md" and target.is_file() else ""
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}
        if not target.exists() or (anchor and anchor not in anchors):
            found.append(f"{file}#{anchor}")
    return found


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")), ids=lambda page: page.stem)
def test_links_of_the_pages_at_the_top_lead_somewhere(page: Path) -> None:
    assert dead_links(page) == []


def test_a_dead_link_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# One\n[a](b.md) [b](a.md#one) [c](a.md#two) [d](https://c.d/e)\n")
    assert dead_links(tmp_path / "a.md") == ["b.md#", "a.md#two"]
