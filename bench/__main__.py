"""`python -m bench NAME [ARGUMENT...]`: run one benchmark; its result is one JSON line, the last of its output.

A benchmark is a module `bench/NAME.py` with `main() -> dict`; it reads its own arguments from sys.argv, and
its docstring says what it measures, in which units. Benchmarks report figures and judge nothing.
"""

import ast
import importlib
import json
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def benchmarks() -> dict[str, str]:
    """Name -> first line of the docstring, without importing any of them."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or "").split("\n", 1)[0]
    del found["__main__"]
    return found


def main() -> int:
    """Run the benchmark that was named."""
    names = benchmarks()
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name not in names:
        is_help = name in ("-h", "--help")
        out = sys.stdout if is_help else sys.stderr
        listing = "\n".join(f"  {known:<12} {words}" for known, words in names.items())
        unknown = "" if is_help else f"no benchmark {name!r}\n"
        print(f"{unknown}usage: python -m bench NAME [ARGUMENT...]\n{listing}", file=out)
        return 0 if is_help else 2
    sys.argv = [f"python -m bench {name}", *sys.argv[2:]]
    result = importlib.import_module(f"bench.{name}").main()
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
