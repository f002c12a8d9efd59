"""What the pages say is so: links lead to files and headings that are there, and fences marked `run` succeed.

    ```sh run
    curl localhost:8000/v1/completions -H 'content-type: application/json' -d '{"prompt":"x"}'
    ```

Such a block runs as one script in the repository's root with the set-up environment first in PATH; a block marked
`json run` is the body of a POST to /v1/completions. In place of localhost:8000 they find one embedded server, which
takes scripts and faults. Each must exit with 0 within a minute; a status other than 2xx is a failure of curl. Other
fences are only shown, such as those that start a server. If no fence at all is marked, that is a mistake too.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from octavo.testing import octavo_server

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```(sh|json) run\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
TIME_LIMIT_S = 60
ADDRESS = "localhost:8000"
PRELUDE = 'curl() { command curl --silent --show-error --fail-with-body "$@"; }\n'
POST = f"curl -N {ADDRESS}/v1/completions -H 'content-type: application/json' --data-binary @-\n"


@dataclass(frozen=True)
class Block:
    """A fence to be run: a script and what it reads."""

    page: Path
    script: str
    stdin: str = ""


def pages() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> Iterator[str]:
    """Names of a page's headings, as GitHub makes them."""
    seen: Counter[str] = Counter()
    for heading in HEADING.findall(prose(page)):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        yield f"{name}-{seen[name]}" if seen[name] else name
        seen[name] += 1


def dead_links(page: Path) -> Iterator[str]:
    """Relative links to files or headings that are not there; addresses elsewhere are not asked."""
    for target, anchor in LINK.findall(prose(page)):
        file = page.parent / target if target else page
        if ":" in target:
            continue
        if not file.exists():
            yield f"{page.name}: links to {target}, which is not there"
        elif anchor and anchor not in anchors(file):
            yield f"{page.name}: links to #{anchor}, a heading that {file.name} has not"


def blocks(page: Path) -> Iterator[Block]:
    for language, text in BLOCK.findall(page.read_text()):
        yield Block(page, text) if language == "sh" else Block(page, POST, stdin=text)


def failure(block: Block, url: str) -> str | None:
    """What went wrong with a block at the server of this address; None if nothing did."""
    print(f"--- {block.page.name}\n{block.script}{block.stdin}", end="", flush=True)
    script = PRELUDE + block.script.replace(ADDRESS, url.removeprefix("http://"))
    result = subprocess.run(
        ["timeout", str(TIME_LIMIT_S), "bash", "-euo", "pipefail", "-c", script],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
        input=block.stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    what = f"{block.page.name}: exit {result.returncode} from:\n{block.script}{block.stdin}{result.stdout}"
    return what if result.returncode else None


def main() -> int:
    wrong = [problem for page in pages() for problem in dead_links(page)]
    to_run = [block for page in pages() for block in blocks(page)]
    if not to_run:
        wrong.append("no page has a fence that is marked to be run")
    with octavo_server() as url:
        wrong += [problem for block in to_run if (problem := failure(block, url)) is not None]
    print("\n".join(["--- wrong:", *wrong]) if wrong else f"--- {len(pages())} pages hold, {len(to_run)} blocks ran")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
