"""The house's plan, held to the code: who may import whom, what never enters core, where a test belongs.

Every rule is a function from a module to its violations, so that each can also be shown a module that breaks it. The
plan is the section "Import directions" of docs/architecture.md; a new file in core needs a line in `MAY_IMPORT`.
"""

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import core

ROOT = Path(__file__).resolve().parent.parent

# What each part of core may import besides itself. A part is a module or a package directly below core.
GROUND = {"errors", "config"}
INTEGERS = GROUND | {"block_hash", "sampling_params", "request", "step"}
LAWS = INTEGERS | {"shapes", "model", "tokenizer"}
RUNNERS = LAWS | {"decoding", "memory"}
MAY_IMPORT = {
    "errors": set(),
    "shapes": set(),
    "config": {"errors"},
    "block_hash": set(),
    "pace": set(),
    "sampling_params": GROUND,
    "request": GROUND | {"block_hash", "sampling_params"},
    "step": GROUND | {"request"},
    "memory": INTEGERS,
    "scheduling": INTEGERS | {"memory"},
    "model": GROUND | {"shapes"},
    "limits": INTEGERS | {"memory", "model"},
    "tokenizer": GROUND | {"shapes", "model"},
    "decoding": LAWS,
    "model_runner": RUNNERS,
    "scripted": RUNNERS,
    "stats": RUNNERS | {"scheduling", "model_runner"},
    "engine": RUNNERS | {"limits", "pace", "scheduling", "model_runner", "scripted", "stats"},
    "loading": RUNNERS | {"scheduling", "model_runner", "scripted", "stats", "engine"},
    "__init__": {"*"},
    "__main__": {"*"},
}
WITHOUT_NUMPY = INTEGERS | {"memory", "scheduling", "limits"}
NOT_IN_CORE = {"asyncio", "threading", "_thread", "concurrent", "fastapi", "starlette", "uvicorn", "pydantic", "httpx"}
HEAVY = {
    "numba",
    "gguf",
    "torch",
    "tokenizers",
    "safetensors",
    "transformers",
    "huggingface_hub",
    "llguidance",
    "openai",
    "anthropic",
    "opentelemetry",
}
# Modules that only a function imports: they may import heavy packages, as nobody imports them at start.
LATE = {
    "core.tokenizer_files",
    "core.tokenizer_gguf",
    "core.model.gguf_reader",
    *(f"core.model.kernels.{path.stem}" for path in (ROOT / "core/model/kernels").glob("[a-z]*.py")),
}
# The one module of core that starts threads: they run compiled code, without Python's lock.
WITH_THREADS = {"core.model.kernels.team"}
# Tests of a whole model or of the whole engine; they belong to no one module.
OF_THE_WHOLE = {Path("tests/core/model/test_smollm2.py"), Path("tests/core/test_batch_invariance.py")}
# Written in two halves, so that this file too names none of them.
REGISTRY_HOSTS = tuple(
    f"{name}.{domain}"
    for name, domain in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("deb.debian", "org"),
        ("security.debian", "org"),
        ("npmjs", "org"),
        ("archive.ubuntu", "com"),
    )
)


def part_of(name: str) -> str:
    """The part that a module of core belongs to: `tokenizer_files` would be a second room of `tokenizer`."""
    return name if name in MAY_IMPORT or "_" not in name else part_of(name.rpartition("_")[0])


@dataclass(frozen=True)
class Module:
    """A source file: its dotted name (`core.memory`, `core.memory.__init__` for the package's own file) and tree."""

    name: str
    tree: ast.Module

    @property
    def top(self) -> str:
        return self.name.split(".")[0]

    @property
    def part(self) -> str:
        return part_of(self.name.split(".")[1])


@dataclass(frozen=True)
class Import:
    """`import target` (names empty) or `from target import names`, target dotted and absolute."""

    target: str
    names: tuple[str, ...]
    is_at_start: bool

    @property
    def top(self) -> str:
        return self.target.split(".")[0]

    def reaches(self, modules: set[str]) -> bool:
        return bool(modules & {self.target, *(f"{self.target}.{name}" for name in self.names)})

    def parts_of_core(self) -> set[str]:
        """The parts of core that it reaches; `__init__` when it takes a public name from core itself."""
        if self.top != "core":
            return set()
        if "." in self.target:
            return {part_of(self.target.split(".")[1])}
        parts = {part_of(name) for name in self.names} or {"__init__"}
        return {part if part in MAY_IMPORT else "__init__" for part in parts}


def _module(path: Path) -> Module:
    return Module(".".join(path.relative_to(ROOT).with_suffix("").parts), ast.parse(path.read_text(), str(path)))


def _modules(*folders: str) -> list[Module]:
    return [_module(path) for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def _imports(module: Module) -> Iterator[Import]:
    """Every import of a module; `is_at_start` tells those that run when the module is imported."""
    yield from _imports_below(module.tree, module, is_at_start=True)


def _imports_below(node: ast.AST, module: Module, *, is_at_start: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import(names=names):
                yield from (Import(alias.name, (), is_at_start) for alias in names)
            case ast.ImportFrom(module=target, names=names, level=level):
                base = module.name.split(".")[:-level] if level else []
                dotted = ".".join([*base, *([target] if target else [])])
                yield Import(dotted, tuple(alias.name for alias in names), is_at_start)
            case _:
                runs = is_at_start and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                runs = runs and not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))
                yield from _imports_below(child, module, is_at_start=runs)


def core_directions(module: Module) -> list[str]:
    """Parts of core import only those below them."""
    if module.part not in MAY_IMPORT:
        return [f"{module.name}: has no line in MAY_IMPORT"]
    allowed = MAY_IMPORT[module.part] | {module.part}
    reached = {part for imported in _imports(module) for part in imported.parts_of_core()}
    return [] if "*" in allowed else [f"{module.name}: imports core.{part}" for part in sorted(reached - allowed)]


def core_stays_alone(module: Module) -> list[str]:
    """No event loop, threads, HTTP or pydantic in core, and nothing of app or loadgen."""
    banned = NOT_IN_CORE | {"app", "loadgen", "tests"}
    if module.name in WITH_THREADS:
        banned -= {"concurrent"}
    return [f"{module.name}: imports {i.target}" for i in _imports(module) if i.top in banned]


def core_reads_no_environment(module: Module) -> list[str]:
    """Settings reach core as values."""
    names = {"environ", "environb", "getenv", "putenv"}
    found = [n.attr for n in ast.walk(module.tree) if isinstance(n, ast.Attribute) and n.attr in names]
    found += [name for i in _imports(module) if i.top == "os" for name in i.names if name in names]
    return [f"{module.name}: uses os.{name}" for name in found]


def books_are_integers(module: Module) -> list[str]:
    """Memory, scheduling and what lies below them know no arrays."""
    if module.part not in WITHOUT_NUMPY:
        return []
    return [f"{module.name}: imports {i.target}" for i in _imports(module) if i.top == "numpy"]


def app_uses_the_front_door(module: Module) -> list[str]:
    """App takes core's public names from core itself, and the command line alone knows the load generator."""
    inner = [
        f"{module.name}: imports {i.target} {' '.join(i.names)}".rstrip()
        for i in _imports(module)
        if i.top == "core" and (i.target != "core" or set(i.names) - set(core.__all__))
    ]
    callers = {"app.cli", "app.__main__"}
    outer = [f"{module.name}: imports loadgen" for i in _imports(module) if i.top == "loadgen"]
    return inner + ([] if module.name in callers else outer)


def helpers_stand_alone(module: Module) -> list[str]:
    """What other projects import drags nothing of the server in, nor any package but pytest, into its fixtures."""
    allowed = {"octavo", *sys.stdlib_module_names, *({"pytest"} if module.name == "octavo.pytest_plugin" else ())}
    return [f"{module.name}: imports {i.target}" for i in _imports(module) if i.top not in allowed]


def loadgen_is_a_stranger(module: Module) -> list[str]:
    """The load generator knows a server only over HTTP."""
    return [f"{module.name}: imports {i.target}" for i in _imports(module) if i.top in {"app", "core", "tests"}]


def heavy_packages_wait(module: Module) -> list[str]:
    """Heavy packages are imported where they are used, so that start-up stays short; so are modules that need them."""
    at_start = [] if module.name in LATE else [i for i in _imports(module) if i.is_at_start]
    return [f"{module.name}: imports {i.target} at start" for i in at_start if i.top in HEAVY or i.reaches(LATE)]


Rule = Callable[[Module], list[str]]
RULES: list[tuple[Rule, tuple[str, ...]]] = [
    (core_directions, ("core",)),
    (core_stays_alone, ("core",)),
    (core_reads_no_environment, ("core",)),
    (books_are_integers, ("core",)),
    (app_uses_the_front_door, ("app",)),
    (loadgen_is_a_stranger, ("loadgen",)),
    (helpers_stand_alone, ("octavo",)),
    (heavy_packages_wait, ("core", "app", "loadgen")),
]


@pytest.mark.parametrize(("rule", "folders"), RULES, ids=lambda value: getattr(value, "__name__", ""))
def test_every_module_keeps_to_the_plan(rule: Rule, folders: tuple[str, ...]):
    assert [] == [violation for module in _modules(*folders) for violation in rule(module)]


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (core_directions, "core.scheduling.scheduler", "from core.model_runner import ModelRunner"),
        (core_directions, "core.model_runner", "import core.scheduling.scheduler"),
        (core_directions, "core.memory.block_pool", "from core import model"),
        (core_directions, "core.model.linear", "def late():\n    from ..memory import block_pool"),
        (core_directions, "core.request", "from core import Engine"),
        (core_directions, "core.attic", ""),
        (core_stays_alone, "core.engine", "import asyncio"),
        (core_stays_alone, "core.engine", "from concurrent.futures import ThreadPoolExecutor"),
        (core_stays_alone, "core.stats", "from app.metrics import gauge"),
        (core_reads_no_environment, "core.config", "import os\nHOME = os.environ['HOME']"),
        (core_reads_no_environment, "core.config", "from os import getenv"),
        (books_are_integers, "core.memory.block_pool", "import numpy.typing as npt"),
        (app_uses_the_front_door, "app.completions", "from core.engine import Engine"),
        (app_uses_the_front_door, "app.completions", "from core import engine"),
        (app_uses_the_front_door, "app.ops", "from loadgen.metrics import percentile"),
        (loadgen_is_a_stranger, "loadgen.client", "from core import blocks_needed"),
        (helpers_stand_alone, "octavo.testing", "from app.server import Server"),
        (helpers_stand_alone, "octavo.testing", "import pytest"),
        (heavy_packages_wait, "core.model.weights", "try:\n    import gguf\nexcept ImportError:\n    gguf = None"),
        (heavy_packages_wait, "core.tokenizer", "class Bpe:\n    from tokenizers import Tokenizer"),
        (heavy_packages_wait, "core.tokenizer", "from core.tokenizer_gguf import load_gguf_tokenizer"),
        (heavy_packages_wait, "core.tokenizer", "from core import tokenizer_files"),
    ],
)
def test_a_module_that_breaks_the_plan_is_named(rule: Rule, name: str, source: str):
    assert rule(Module(name, ast.parse(source)))


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (core_directions, "core.scheduling.scheduler", "from core.memory.block_manager import BlockManager"),
        (core_directions, "core.__init__", "from core.engine import Engine"),
        (books_are_integers, "core.model.linear", "import numpy as np"),
        (app_uses_the_front_door, "app.cli", "import loadgen\nfrom core import BlockManager"),
        (heavy_packages_wait, "core.tokenizer", "def load():\n    import tokenizers"),
        (heavy_packages_wait, "core.tokenizer", "if TYPE_CHECKING:\n    from tokenizers import Tokenizer"),
    ],
)
def test_a_module_within_the_plan_is_left_alone(rule: Rule, name: str, source: str):
    assert [] == rule(Module(name, ast.parse(source)))


@pytest.mark.parametrize("start", ["core", "app.cli", "loadgen"])
def test_starting_up_loads_no_heavy_package(start: str):
    """What the imports at the top of each file say, asked of the interpreter: other packages may drag them in."""
    code = f"import sys, {start}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    assert "" == result.stdout.strip()


def test_core_exports_exactly_the_names_it_lists():
    modules = {name for name, value in vars(core).items() if isinstance(value, type(sys))}
    public = {name for name in vars(core) if not name.startswith("_")} - modules

    assert public == set(core.__all__)
    assert len(core.__all__) == len(set(core.__all__))


def _tracked_texts() -> Iterator[tuple[str, str]]:
    """Files that are in the repository or would be on the next add, those that are text."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        data = (ROOT / name).read_bytes() if (ROOT / name).is_file() else b"\0"
        if b"\0" not in data:
            yield name, data.decode("utf-8", "replace")


def test_no_file_names_a_package_registry():
    """Where packages come from is the machine's setting, so that mirrors and proxies work."""
    assert [] == [f"{name}: {host}" for name, text in _tracked_texts() for host in REGISTRY_HOSTS if host in text]


def unmirrored(test: Path, sources: set[Path]) -> bool:
    """Whether tests/core/x/test_y.py (or test_y_more.py) has no core/x/y.py nor package core/x/y.

    Of a package tested in its own folder, the file `__init__` is called init.
    """
    folder = test.parent.relative_to("tests")
    stems = {source.stem.strip("_") for source in sources if source.parent == folder}
    stems |= {source.parent.name for source in sources if source.parent.parent == folder}
    name = test.stem.removeprefix("test_")
    return not any(name == stem or name.startswith(stem + "_") for stem in stems)


def test_tests_lie_where_their_modules_do():
    folders = ("core", "app", "loadgen", "octavo")
    sources = {p.relative_to(ROOT) for folder in folders for p in (ROOT / folder).rglob("*.py")}
    tests = [p.relative_to(ROOT) for folder in folders for p in sorted((ROOT / "tests" / folder).rglob("test_*.py"))]

    assert [] == [str(test) for test in tests if test not in OF_THE_WHOLE and unmirrored(test, sources)]


def test_a_test_without_its_module_is_named():
    sources = {Path("core/memory/block_pool.py"), Path("core/__main__.py"), Path("core/model/tiny/__init__.py")}

    assert unmirrored(Path("tests/core/test_block_pool.py"), sources)
    assert not unmirrored(Path("tests/core/memory/test_block_pool_machine.py"), sources)
    assert not unmirrored(Path("tests/core/test_main.py"), sources)
    assert not unmirrored(Path("tests/core/model/test_tiny.py"), sources)
