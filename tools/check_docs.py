"""What the pages say is so: links lead somewhere, and the commands in fences marked `sh run` succeed.

    ```sh run
    python -m core
    ```

A block runs as one script in the repository's root with the set-up environment first in PATH; it must exit with 0
within two minutes. Blocks marked plain `sh` are only shown, such as those that start a server.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```sh run\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
TIME_LIMIT_S = 120


def pages() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def dead_links(page: Path) -> Iterator[str]:
    """Relative links to files that are not there; addresses elsewhere are not asked."""
    for target, _ in LINK.findall(FENCE.sub("", page.read_text())):
        if ":" not in target and not (page.parent / target).exists():
            yield f"{page.relative_to(ROOT)}: links to {target}, which is not there"


def failing_commands(page: Path) -> Iterator[str]:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for script in BLOCK.findall(page.read_text()):
        print(f"--- {page.relative_to(ROOT)}\n{script}", end="", flush=True)
        command = ["timeout", str(TIME_LIMIT_S), "bash", "-euo", "pipefail", "-c", script]
        code = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, check=False).returncode
        if code:
            yield f"{page.relative_to(ROOT)}: exit {code} from:\n{script}"


def main() -> int:
    wrong = [problem for page in pages() for check in (dead_links, failing_commands) for problem in check(page)]
    print("\n".join(["--- wrong:", *wrong]) if wrong else f"--- {len(pages())} pages hold")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
