"""
Figures of the code as a house: `python dev/measure_code.py [FOLDER]`, or with --lint every place that breaks a rule.

Reads source files as syntax trees and as text; it imports and runs nothing. The rules for words are in dev/words.toml.
FOLDER is another checkout to measure (default: this one), so that two versions can be compared by one script.
"""

import argparse
import ast
import io
import keyword
import re
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60
DUPLICATE_LINES = 8
DISTINCT_SHAPES = 6  # of the eight lines: rows that look alike are data, not a duplicate
LIMITS = {  # what is reached may not be lost
    "modules": 206,
    "lines of Python": 59_700,
    "lines of JavaScript": 2_700,
    "modules with a single importer": 33,
    "import circles": 0,
    "files over 400 lines": 0,
    "functions over 60 lines": 0,
    "names from the word list": 0,
    "sentences with a listed phrase": 0,
    "names of modules or classes used twice": 0,
    "files that name an optimizer": 7,
    "files on one token's way": 14,
    "runs of eight lines that stand twice": 0,
}
OPTIMIZER = re.compile(r"(?i)muon|adamw|newton_schulz")
TOKENS_WAY = re.compile(r"^\d+\. `(paceline/[\w/]+\.py)`", re.MULTILINE)


@dataclass(frozen=True)
class Module:
    """One file of the package: its dotted name, text, syntax tree, and all nodes of the tree."""

    name: str
    path: Path
    text: str
    tree: ast.Module
    nodes: list[ast.AST]


@dataclass(frozen=True)
class Words:
    """The word list: names that say nothing, parts of names, phrases that a reader must translate; each with its reason."""

    names: dict[str, str]
    parts: dict[str, str]
    phrases: dict[str, str]


def load_modules(root: Path) -> list[Module]:
    """Every module of the package but `__init__` and `__main__`."""
    paths = sorted(
        path for path in (root / "paceline").rglob("*.py") if path.name not in ("__init__.py", "__main__.py")
    )
    names = [".".join(path.relative_to(root).with_suffix("").parts) for path in paths]
    return [
        Module(name, path, text := path.read_text(), tree := ast.parse(text), list(ast.walk(tree)))
        for name, path in zip(names, paths, strict=True)
    ]


def imports_of(module: Module, names: set[str]) -> set[str]:
    """The modules of the package that this one imports, inside functions too."""
    targets: set[str] = set()
    for node in module.nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            targets |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
    return (targets & names) - {module.name}


def find_circles(imports: dict[str, set[str]]) -> list[str]:
    """Sets of modules that import each other, by Tarjan's strongly connected components."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    circles: list[str] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in imports[name]:
            if target not in index:
                visit(target)
            if target in stack:
                low[name] = min(low[name], low[target])
        if low[name] == index[name]:
            members = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(members) > 1:
                circles.append(" <-> ".join(sorted(members)))

    for name in imports:
        if name not in index:
            visit(name)
    return circles


def long_functions(module: Module) -> Iterator[str]:
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
            size = node.end_lineno - node.lineno + 1
            if size > MAX_FUNCTION_LINES:
                yield f"{module.path}:{node.lineno}: {node.name} has {size} lines"


def names_in(module: Module) -> Iterator[tuple[int, str, bool]]:
    """(line, name, whether it is of a module, function or class) of everything that the module defines."""
    yield 1, module.name.rpartition(".")[2], True
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name, True
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg, False
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id, False
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr, False


def listed_names(module: Module, words: Words) -> Iterator[str]:
    """Names that the word list refuses: whole for a value, in parts for a module, function or class."""
    for line, name, is_definition in names_in(module):
        parts = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_").split("_")
        whole = "_".join(parts)
        if whole in words.names:
            yield f"{module.path}:{line}: {name}: {words.names[whole]}"
        elif is_definition:
            for part in parts:
                if part in words.parts:
                    yield f"{module.path}:{line}: {name}: {words.parts[part]}"


def listed_phrases(path: Path, text: str, words: Words) -> Iterator[str]:
    reasons = {re.compile(phrase): reason for phrase, reason in words.phrases.items()}
    for number, line in enumerate(text.splitlines(), 1):
        for phrase, reason in reasons.items():
            if phrase.search(line):
                yield f"{path}:{number}: {line.strip()[:90]!r}: {reason}"


def names_used_twice(modules: list[Module]) -> Iterator[str]:
    places: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        places[module.name.rpartition(".")[2]].append(module.name)
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{module.name}.{node.name}")
    yield from (f"{name}: {', '.join(where)}" for name, where in sorted(places.items()) if len(where) > 1)


def shape_lines(module: Module) -> list[tuple[int, str]]:
    """(line number, shape) of each line of code: names become n, numbers 0, strings s. Without imports, docstrings and tables."""
    skipped: set[int] = set()
    for node in module.nodes:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if (isinstance(node, ast.Import | ast.ImportFrom) or is_text) and node.end_lineno:
            skipped |= set(range(node.lineno, node.end_lineno + 1))
    for node in module.tree.body:
        is_table = isinstance(getattr(node, "value", None), ast.Tuple | ast.List | ast.Dict)
        if isinstance(node, ast.Assign | ast.AnnAssign) and is_table and node.end_lineno:
            skipped |= set(range(node.lineno, node.end_lineno + 1))
    shapes: dict[int, list[str]] = defaultdict(list)
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.start[0] in skipped or token.type in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE):
            continue
        if token.type in (tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER):
            continue
        kinds = {tokenize.NUMBER: "0", tokenize.STRING: "s", tokenize.NAME: "n"}
        shape = token.string if keyword.iskeyword(token.string) else kinds.get(token.type, token.string)
        shapes[token.start[0]].append(shape)
    lines = [(number, " ".join(shape)) for number, shape in sorted(shapes.items())]
    return [(number, shape) for number, shape in lines if re.search(r"[n0s]", shape)]


def find_duplicates(modules: list[Module]) -> Iterator[str]:
    """Pairs of places where eight lines of code have the same shapes; tables of similar rows do not count."""
    first: dict[tuple[str, ...], tuple[Path, int]] = {}
    last_end: tuple[Path, int] | None = None
    for module in modules:
        lines = shape_lines(module)
        for start in range(len(lines) - DUPLICATE_LINES + 1):
            window = lines[start : start + DUPLICATE_LINES]
            shapes = tuple(shape for _, shape in window)
            if len(set(shapes)) < DISTINCT_SHAPES or sum(len(shape.split()) for shape in shapes) < 5 * DUPLICATE_LINES:
                continue
            place = (module.path, window[0][0])
            if shapes not in first:
                first[shapes] = place
            elif last_end is None or last_end[0] != module.path or window[0][0] > last_end[1]:
                yield f"{place[0]}:{place[1]} and {first[shapes][0]}:{first[shapes][1]}"
                last_end = (module.path, window[-1][0])


def load_words(file: Path) -> Words:
    table = tomllib.loads(file.read_text())
    return Words(table["names"], table["parts"], table["phrases"])


def prose_files(root: Path) -> Iterator[Path]:
    """Where sentences stand that a user or a contributor reads."""
    yield from sorted((root / "paceline").rglob("*.py"))
    yield from sorted((root / "paceline").rglob("*.toml"))
    yield from sorted((root / "paceline" / "watch" / "static").glob("*.js"))
    yield from sorted((root / "docs").glob("*.md"))
    yield from (path for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md") if (path := root / name).is_file())


def measure(root: Path) -> dict[str, list[str]]:
    """Each figure's places: its value is their number, but for line counts, which come as one text."""
    modules = load_modules(root)
    names = {module.name for module in modules}
    imports = {module.name: imports_of(module, names) for module in modules}
    importers = Counter(target for targets in imports.values() for target in targets)
    words = load_words(HERE / "dev" / "words.toml")
    scripts = sorted((root / "paceline").rglob("*.js"))
    architecture = root / "docs" / "architecture.md"
    page = architecture.read_text() if architecture.is_file() else ""
    way = TOKENS_WAY.findall(page.partition("## The way of one token\n")[2].partition("\n## ")[0])
    every_python = sorted((root / "paceline").rglob("*.py"))
    return {
        "modules": sorted(names),
        "lines of Python": [str(sum(len(path.read_text().splitlines()) for path in every_python))],
        "lines of JavaScript": [str(sum(len(path.read_text().splitlines()) for path in scripts))],
        "modules with a single importer": sorted(name for name in names if importers[name] == 1),
        "import circles": find_circles(imports),
        "files over 400 lines": [
            f"{path}: {size} lines"
            for path in [*every_python, *scripts]
            if (size := len(path.read_text().splitlines())) > MAX_FILE_LINES
        ],
        "functions over 60 lines": [place for module in modules for place in long_functions(module)],
        "names from the word list": [place for module in modules for place in listed_names(module, words)],
        "sentences with a listed phrase": [
            place for path in prose_files(root) for place in listed_phrases(path, path.read_text(), words)
        ],
        "names of modules or classes used twice": list(names_used_twice(modules)),
        "files that name an optimizer": [str(module.path) for module in modules if OPTIMIZER.search(module.text)],
        "files on one token's way": way,
        "runs of eight lines that stand twice": list(find_duplicates(modules)),
    }


def value_of(name: str, places: list[str]) -> int:
    return int(places[0]) if name.startswith("lines of") else len(places)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=HERE)
    parser.add_argument(
        "--lint", action="store_true", help="print every place that breaks a limit; exit code 1 if any does"
    )
    parser.add_argument("--places", metavar="FIGURE", help="print the places of one figure, named by its first words")
    args = parser.parse_args()
    figures = measure(args.folder)
    if args.places:
        print("\n".join(place for name in figures if name.startswith(args.places) for place in figures[name]))
        return 0
    over = [name for name, places in figures.items() if value_of(name, places) > LIMITS[name]]
    if not args.lint:
        for name, places in figures.items():
            print(f"{name:40} {value_of(name, places):>7,}   at most {LIMITS[name]:,}")
        return 0
    for name in over:
        print(f"{name}: {value_of(name, figures[name])}, at most {LIMITS[name]}", *figures[name], sep="\n  ")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
