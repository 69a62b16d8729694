"""The structure of the package: rooms, sizes, who imports whom, and what should not be there.

    python tools/house.py                                    # a table
    python tools/house.py --at HEAD~1                        # of another commit, for a comparison
    python tools/house.py --json                             # for programs
    python tools/house.py --picture docs/pictures/rooms.png  # draws the rooms

A room is a folder or a module directly below the package. An arrow leads from who imports to what is imported; imports
inside functions and under TYPE_CHECKING count, for they too must be understood together. The exit status is 1 if
modules import each other in a circle. Standard library only; the picture needs matplotlib.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "megatron_rl"
SHORT = 30
"""Lines under which a module is listed: one that only its neighbour needs may move in with it."""
ENTRANCES = ("__init__", "__main__")
"""Names that every folder may have."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    name: str
    """Dotted, below the package; the name of a folder stands for its `__init__.py`."""
    file: str
    """Below the checkout."""
    room: str
    job: str
    """First sentence of the docstring."""
    lines: int
    functions: tuple[tuple[str, int], ...]
    """Name of each function and its lines without its docstring."""
    imports: frozenset[str]
    """Modules of the package that it imports."""

    @property
    def stem(self) -> str:
        """File name without its ending."""
        return Path(self.file).stem


@dataclass(frozen=True)
class Room:
    """A folder or module directly below the package, its subfolders included."""

    name: str
    job: str
    files: int
    lines: int
    functions: int
    imports: tuple[str, ...]
    """Other rooms that it imports."""
    inner: int
    """Arrows between its own modules."""


@dataclass(frozen=True)
class House:
    """What was measured."""

    rooms: tuple[Room, ...]
    room_arrows: int
    """Pairs of rooms of which one imports the other."""
    module_arrows: int
    """Pairs of modules of which one imports the other."""
    files: int
    lines: int
    functions: int
    circles: tuple[tuple[str, ...], ...]
    """Modules that import each other, directly or by way of others."""
    repeated: Mapping[str, tuple[str, ...]]
    """File name → the rooms that have one of that name, where there are two or more."""
    short: Mapping[str, int]
    """Modules of fewer than SHORT lines → lines; entrances of folders are not counted."""
    longest_file: tuple[str, int]
    longest_function: tuple[str, int]
    """`file:name` and lines without the docstring."""


def imported_names(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """`(line, dotted name)` of every import in the file; `from a import b` gives `a.b`, relative ones are resolved."""
    package = list(path.relative_to(root).with_suffix("").parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *([node.module] if node.module else [])]
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)


def code_lines(function: Function) -> int:
    """Lines from `def` to the end, less the docstring's."""
    total = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function) is None:
        return total
    docstring = function.body[0]
    return total - ((docstring.end_lineno or docstring.lineno) - docstring.lineno + 1)


def read_modules(root: Path) -> dict[str, Module]:
    """Every module of `root/megatron_rl` by its dotted name; the package itself has the name `__init__`."""
    paths = {_dotted(path, root): path for path in sorted((root / PACKAGE).rglob("*.py"))}
    return {name: _read(name, path, root, paths) for name, path in paths.items()}


def _dotted(path: Path, root: Path) -> str:
    parts = path.relative_to(root / PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _read(name: str, path: Path, root: Path, known: Iterable[str]) -> Module:
    source = path.read_text()
    tree = ast.parse(source)
    found = (_module_of(imported, known) for _, imported in imported_names(path, root))
    return Module(
        name=name,
        file=str(path.relative_to(root)),
        room=name.split(".")[0],
        job=_first_sentence(ast.get_docstring(tree) or ""),
        lines=len(source.splitlines()),
        functions=tuple((node.name, code_lines(node)) for node in ast.walk(tree) if isinstance(node, Function)),
        imports=frozenset(other for other in found if other not in (None, name)),
    )


def _module_of(imported: str, known: Iterable[str]) -> str | None:
    """The module that an imported name is or lies in; None: it is of another package."""
    package, *parts = imported.split(".")
    if package != PACKAGE:
        return None
    while parts and ".".join(parts) not in known:
        parts.pop()
    return ".".join(parts) or "__init__"


def _first_sentence(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split()).split(". ")[0].rstrip(".")


def circles(imports: Mapping[str, Iterable[str]]) -> list[tuple[str, ...]]:
    """Groups of nodes that reach each other, by Tarjan's algorithm; each sorted, and so is the list.

    Args:
        imports: node → the nodes that it points to; others than the keys are ignored.
    """
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[tuple[str, ...]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(set(imports[node]) & imports.keys()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[-len(group) :]
            if len(group) > 1:
                found.append(tuple(sorted(group)))

    for node in sorted(imports):
        if node not in index:
            visit(node)
    return sorted(found)


def import_circles(root: Path) -> list[tuple[str, ...]]:
    """Groups of modules of `root/megatron_rl` that import each other."""
    return circles({name: module.imports for name, module in read_modules(root).items()})


def measure(root: Path) -> House:
    """Measure `root/megatron_rl`."""
    modules = read_modules(root)
    rooms = _rooms(modules)
    own = [module for module in modules.values() if module.stem not in ENTRANCES]
    homes: dict[str, set[str]] = {}
    for module in own:
        homes.setdefault(module.stem, set()).add(module.room)
    longest = max(modules.values(), key=lambda module: module.lines)
    functions = [(f"{module.file}:{name}", lines) for module in modules.values() for name, lines in module.functions]
    return House(
        rooms=rooms,
        room_arrows=sum(len(room.imports) for room in rooms),
        module_arrows=sum(len(module.imports) for module in modules.values()),
        files=len(modules),
        lines=sum(module.lines for module in modules.values()),
        functions=len(functions),
        circles=tuple(circles({name: module.imports for name, module in modules.items()})),
        repeated={stem: tuple(sorted(found)) for stem, found in sorted(homes.items()) if len(found) > 1},
        short={module.file: module.lines for module in own if module.lines < SHORT},
        longest_file=(longest.file, longest.lines),
        longest_function=max(functions, key=lambda found: found[1], default=("", 0)),
    )


def _rooms(modules: Mapping[str, Module]) -> tuple[Room, ...]:
    """Rooms of the package; its own `__init__` and `__main__` are entrances, not rooms."""
    names = sorted({module.room for module in modules.values()} - set(ENTRANCES))
    return tuple(_room(name, modules, names) for name in names)


def _room(name: str, modules: Mapping[str, Module], rooms: Sequence[str]) -> Room:
    own = [module for module in modules.values() if module.room == name]
    targets = [modules[other].room for module in own for other in module.imports]
    return Room(
        name=name,
        job=modules[name].job if name in modules else "",
        files=len(own),
        lines=sum(module.lines for module in own),
        functions=sum(len(module.functions) for module in own),
        imports=tuple(sorted({room for room in targets if room in rooms and room != name})),
        inner=targets.count(name),
    )


def measure_commit(commit: str, checkout: Path = ROOT) -> House:
    """Measure the package as it was at a commit of a git checkout.

    Raises:
        SystemExit: git does not know the commit, or the package is not in it.
    """
    command = ["git", "archive", "--format=tar", commit, PACKAGE]
    packed = subprocess.run(command, cwd=checkout, capture_output=True)
    if packed.returncode:
        sys.exit(f"git archive {commit} failed: {packed.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
        return measure(Path(folder))


def report(house: House) -> str:
    """What `house.py` prints: one line a room, then what concerns all of them."""
    lines = [f"{'room':<16} {'files':>5} {'lines':>6} {'functions':>9} {'inner':>5}  imports"]
    for room in house.rooms:
        row = f"{room.name:<16} {room.files:>5} {room.lines:>6} {room.functions:>9} {room.inner:>5}"
        lines.append(f"{row}  {' '.join(room.imports)}".rstrip())
    lines += [
        "",
        f"{len(house.rooms)} rooms, {house.room_arrows} arrows between them, {house.module_arrows} between modules",
        f"{house.files} files, {house.lines} lines, {house.functions} functions",
        f"import circles: {'; '.join(' ↔ '.join(circle) for circle in house.circles) or 'none'}",
        f"file names in two rooms or more: {len(house.repeated)}",
        *(f"  {name}: {', '.join(rooms)}" for name, rooms in house.repeated.items()),
        f"modules under {SHORT} lines: {len(house.short)}",
        *(f"  {file}: {count}" for file, count in house.short.items()),
        f"longest file: {house.longest_file[0]}, {house.longest_file[1]} lines",
        f"longest function: {house.longest_function[0]}, {house.longest_function[1]} lines",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; see the head of this file. Returns the exit status."""
    parser = argparse.ArgumentParser(description="The structure of the package.")
    parser.add_argument("--at", metavar="COMMIT", help="measure this commit instead of the working tree")
    parser.add_argument("--json", action="store_true", help="everything, as JSON")
    parser.add_argument("--picture", metavar="FILE", type=Path, help="draw the rooms into this PNG")
    chosen = parser.parse_args(arguments)
    house = measure_commit(chosen.at) if chosen.at else measure(ROOT)
    print(json.dumps(asdict(house), indent=1) if chosen.json else report(house))
    if chosen.picture:
        # Found beside this file, whether it is run as a script or imported.
        sys.path.insert(0, str(Path(__file__).resolve().parent))
        from house_picture import draw

        draw(house.rooms, chosen.picture)
    return int(bool(house.circles))


if __name__ == "__main__":
    sys.exit(main())
