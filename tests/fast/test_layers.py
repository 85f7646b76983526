"""Who may import whom, as a test. Imports inside functions and under TYPE_CHECKING count like all others."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BASE = {"types", "errors", "config"}
EVERYTHING = {path.stem for path in (ROOT / "gyre").iterdir() if not path.name.startswith("_")}

MAY_IMPORT = {
    "types": set(),
    "errors": set(),
    "owner": set(),
    "config": {"types", "errors"},
    "schedule": BASE,
    "tree": BASE,
    "algo": BASE | {"tree"},
    "simulate": BASE | {"schedule"},
    "wire": BASE,
    "gateway": BASE | {"tree", "wire"},
    "sandbox": BASE | {"owner"},
    "tasks": BASE | {"sandbox"},
    "harness": BASE | {"sandbox"},
    "store": BASE,
    "fabric": BASE | {"owner", "schedule", "wire"},
    "serve": BASE | {"fabric", "owner"},
    "train": BASE | {"fabric", "algo"},
    "watch": BASE | {"schedule", "store"},
    "program": EVERYTHING,
}
"""`fabric` needs the placement, a pure type of `schedule`, to build its groups; it never decides anything."""

LIBRARIES = {
    "types": {"numpy"},
    "errors": set(),
    "config": {"tomli"},
    "schedule": set(),
    "simulate": set(),
    "tree": {"numpy"},
    "algo": {"numpy"},
}
"""The pure packages, and what each may import besides the standard library."""

IMPURE = {"asyncio", "multiprocessing", "secrets", "select", "signal", "socket", "subprocess", "threading", "time"}
"""No clock, process or network in a pure package; times and seeds are arguments."""

HEAVY_ONLY_IN = {
    "torch": {"fabric", "serve", "train", "program"},
    "sglang": {"serve"},
    "megatron": {"train"},
    "transformers": {"serve", "train"},
    "minisweagent": {"harness"},
    "rich": {"watch"},
    "zmq": {"wire"},
}


def imported_by(path: Path) -> Iterator[str]:
    """The full name of every module or name that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            # `from gyre import tree` names the package in the alias.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def all_imports() -> list[tuple[Path, str, str]]:
    """(file, package, imported name) of the whole program."""
    found = []
    for path in sorted((ROOT / "gyre").rglob("*.py")):
        package = path.relative_to(ROOT / "gyre").parts[0].removesuffix(".py")
        found += [(path.relative_to(ROOT), package, name) for name in imported_by(path) if package != "__init__"]
    return found


@pytest.fixture(scope="module", name="imports")
def _imports() -> list[tuple[Path, str, str]]:
    return all_imports()


def test_every_package_has_a_place_in_the_table() -> None:
    assert set(MAY_IMPORT) >= EVERYTHING


def test_packages_import_only_downwards(imports: list[tuple[Path, str, str]]) -> None:
    wrong = []
    for path, package, name in imports:
        top, _, rest = name.partition(".")
        if top == "gyre" and rest.split(".")[0] not in MAY_IMPORT[package] | {package}:
            wrong.append(f"{path} may not import {name}")
    assert not wrong, "\n".join(wrong)


def test_pure_packages_need_the_standard_library_and_little_else(imports: list[tuple[Path, str, str]]) -> None:
    wrong = []
    for path, package, name in imports:
        top = name.split(".")[0]
        if package not in LIBRARIES or top == "gyre":
            continue
        if top not in sys.stdlib_module_names | LIBRARIES[package] or top in IMPURE:
            wrong.append(f"{path} is pure, yet imports {name}")
    assert not wrong, "\n".join(wrong)


def test_heavy_libraries_stay_in_their_packages(imports: list[tuple[Path, str, str]]) -> None:
    wrong = []
    for path, package, name in imports:
        allowed = HEAVY_ONLY_IN.get(name.split(".")[0])
        if allowed is not None and package not in allowed:
            wrong.append(f"{path} may not import {name}")
    assert not wrong, "\n".join(wrong)


def test_only_the_entry_point_imports_the_program() -> None:
    names = [name for name in imported_by(ROOT / "gyre.py") if name.startswith("gyre.")]
    assert names and all(name.startswith("gyre.program") for name in names)
