"""Every link between the project's pages leads somewhere, and every page can be reached from the README."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)[^)]*\)")


def links(page: Path) -> set[Path]:
    found = (target for target in LINK.findall(page.read_text()) if "://" not in target)
    return {(page.parent / target).resolve() for target in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    assert [str(target) for target in links(page) if not target.exists()] == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, waiting = set(), {ROOT / "README.md"}
    while waiting:
        page = waiting.pop()
        reached.add(page)
        waiting |= {target for target in links(page) if target.suffix == ".md"} - reached
    assert sorted(str(page.relative_to(ROOT)) for page in set(PAGES) - reached) == []
