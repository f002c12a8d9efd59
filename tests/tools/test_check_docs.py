"""The checker of pages finds what is wrong with them, and nothing wrong with what is right."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.testing import octavo_server
from tools import check_docs


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with octavo_server() as address:
        yield address


def page_of(directory: Path, text: str) -> Path:
    page = directory / "page.md"
    page.write_text(text)
    return page


@pytest.mark.parametrize(
    ("num_dead", "link"),
    [
        (0, "page.md"),
        (0, "#some-heading-with-code"),
        (0, "page.md#twice-1"),
        (0, "https://example.org/nowhere#at-all"),
        (1, "other.md"),
        (1, "#some-heading"),
        (1, "page.md#twice-2"),
        (1, "#a-comment"),
    ],
)
def test_links_lead_to_files_and_headings(tmp_path: Path, num_dead: int, link: str) -> None:
    headings = "# Some heading, with `code`\n## Twice\n## Twice\n```sh\n# A comment\n```\n"
    page = page_of(tmp_path, f"{headings}[x]({link})\n")

    assert num_dead == len(list(check_docs.dead_links(page)))


@pytest.mark.parametrize(
    ("is_right", "fence"),
    [
        (True, """sh run\ncurl localhost:8000/v1/models | grep octavo-tiny\n"""),
        (True, """json run\n{"prompt": "x", "script": ["Hi"]}\n"""),
        (False, """json run\n{"prompt": "x", "max_tokens": "many"}\n"""),
        (False, """sh run\ncurl localhost:8000/v1/nothing\n"""),
        (False, """sh run\nfalse | true\n"""),
    ],
)
def test_a_marked_fence_must_succeed(tmp_path: Path, url: str, is_right: bool, fence: str) -> None:
    (block,) = check_docs.blocks(page_of(tmp_path, f"```{fence}```\n"))

    assert is_right == (check_docs.failure(block, url) is None)


def test_other_fences_are_only_shown(tmp_path: Path) -> None:
    page = page_of(tmp_path, "```sh\nfalse\n```\n```json\n{}\n```\n```\nfalse\n```\n")

    assert [] == list(check_docs.blocks(page))


def test_pages_without_a_block_to_run_do_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_docs, "pages", lambda: [page_of(tmp_path, "# Nothing\n")])

    assert 1 == check_docs.main()
