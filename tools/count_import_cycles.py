"""Count the import cycles between the modules of the package: `python -m tools.count_import_cycles`.

An edge is an import outside of functions, including imports under `if TYPE_CHECKING`, since modules that use each
other's types have to be read together. A cycle is a strongly connected component of more than one module, or a module
that imports itself. Importing `a.b` is not an edge to the package `a`, although Python runs it first.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src"

Graph = Mapping[str, set[str]]


def import_graph(source: Path, package: str, *, in_functions: bool = False) -> Graph:
    """Return the modules that each module of a package imports.

    Args:
        source: folder that contains the package.
        package: name of the package.
        in_functions: True to count imports in functions as well.
    """
    paths = {_module_name(path, source): path for path in sorted((source / package).rglob("*.py"))}
    walk = ast.walk if in_functions else _outside_functions
    return {name: set(_imports(name, path, paths, walk)) for name, path in paths.items()}


def _module_name(path: Path, source: Path) -> str:
    return ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")


def _imports(
    module: str, path: Path, paths: Mapping[str, Path], walk: Callable[[ast.AST], Iterable[ast.AST]]
) -> Iterator[str]:
    for node in walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in paths)
        elif isinstance(node, ast.ImportFrom):
            origin = _origin(node, module, is_package=path.name == "__init__.py")
            for alias in node.names:
                submodule = f"{origin}.{alias.name}"
                if submodule in paths:
                    yield submodule
                elif origin in paths:
                    yield origin


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _outside_functions(child)


def _origin(node: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    """Return the absolute name of the module after `from`."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parents = parts[: len(parts) - node.level + is_package]
    return ".".join([*parents, *([node.module] if node.module else [])])


def import_cycles(graph: Graph) -> list[list[str]]:
    """Return the cycles of a graph, sorted; each is the sorted list of its modules' names."""
    reached = {name: _reached_from(name, graph) for name in graph}
    components = {
        frozenset(other for other in reached[name] if name in reached[other]) for name in graph if name in reached[name]
    }
    return sorted(sorted(component) for component in components)


def _reached_from(start: str, graph: Graph) -> set[str]:
    """Return the modules that `start` imports directly or indirectly; includes `start` only if it is in a cycle."""
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - reached
        reached |= new
        waiting += new
    return reached


def report(cycles: Sequence[Sequence[str]], graph: Graph) -> str:
    """Return the cycles as text, with each module's imports within its cycle."""
    lines = []
    for cycle in cycles:
        lines.append(f"import cycle of {len(cycle)} modules:")
        lines += [f"  {name} imports {', '.join(sorted(graph[name].intersection(cycle)))}" for name in cycle]
    return "\n".join([*lines, f"import cycles: {len(graph)} modules, {len(cycles)} cycles"])


def main() -> int:
    """Print the cycles of the package; return 1 if there are any."""
    graph = import_graph(SOURCE, "quire")
    cycles = import_cycles(graph)
    print(report(cycles, graph))
    return 1 if cycles else 0


if __name__ == "__main__":
    sys.exit(main())
