"""What those who join need: owners of every part, links that lead somewhere, forms that ask for facts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from documents import links

ROOT = Path(__file__).parents[2]
FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").iterdir() if path.stem != "config")


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


def test_an_owner_without_a_role_or_a_part_is_seen() -> None:
    assert owner_faults("# a\n* @a/b\n/nowhere/ @a/b\n/src/ @a/c\n", "`@a/b`") == ["/nowhere/", "/src/ @a/c"]


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


def form_faults(form: dict[str, Any]) -> list[str]:
    """What GitHub refuses in a form, as far as ours use it."""
    missing = [key for key in ("name", "description", "body") if not form.get(key)]
    parts = [part for part in form.get("body", []) if part.get("type") == "textarea"]
    known = {"label", "description", "render"}
    strange = [str(part) for part in parts if not {"label"} <= set(part["attributes"]) <= known]
    return missing + strange + ["another type"] * (len(form.get("body", [])) - len(parts))


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_forms_are_forms(path: Path) -> None:
    assert form_faults(yaml.safe_load(path.read_text())) == []


def test_what_is_no_form_is_seen() -> None:
    body = [{"type": "input"}, {"type": "textarea", "attributes": {"title": "a"}}]
    assert len(form_faults({"name": "a", "body": body})) == 3
