"""The documentation is executed: docstring examples, code blocks, generated pages and links."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "backends/*/README.md", "serving/README.md", "benchmarks/*.md")
    for page in ROOT.glob(pattern)
)
GENERATED = ("operators.md", "cli.md")
PACKAGES = {
    init.parent.name: init.parent
    for pattern in ("hal/__init__.py", "ops/hal_ops/__init__.py", "backends/*/hal_*/__init__.py")
    for init in sorted(ROOT.glob(pattern))
}
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def code(text: str) -> str:
    """The Python blocks of a page as one script, every line at its place so that tracebacks name the page's lines."""
    inside, lines = False, []
    for line in text.splitlines():
        if line.startswith("```"):
            inside, line = line == "```python", ""
        lines.append(line if inside else "")
    return "\n".join(lines)


def modules(package: str) -> dict[str, Path]:
    """The files of a package by module name; found without importing, so that one broken package fails alone."""
    parts = {
        path: path.relative_to(PACKAGES[package].parent).with_suffix("").parts
        for path in PACKAGES[package].rglob("*.py")
    }
    names = {".".join(p[:-1] if p[-1] == "__init__" else p): path for path, p in parts.items()}
    return {name: names[name] for name in sorted(names) if not name.endswith("__main__")}


def test_there_is_something_to_read() -> None:
    assert {"README.md", "CONTRIBUTING.md", "docs/plugins.md", "docs/structure.md"} <= set(map(relative, PAGES))


@pytest.mark.parametrize("name", [m for package in PACKAGES for m in modules(package)])
def test_docstring_examples(name: str) -> None:
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for example in doctest.DocTestFinder().find(module, name):
        # The compiler keeps names in the globals of what it compiled, and takes them out again when it ends.
        runner.run(example, clear_globs=False)
    assert runner.summarize(verbose=False).failed == 0


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_and_public_function_says_what_it_is(package: str) -> None:
    silent = []
    for name, path in modules(package).items():
        tree = ast.parse(path.read_text())
        public = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and not n.name.startswith("_")]
        silent += [f"{name}.{node.name}" for node in public if ast.get_docstring(node) is None]
        if tree.body and ast.get_docstring(tree) is None:
            silent.append(name)
    assert not silent


@pytest.mark.parametrize("page", [p for p in PAGES if code(p.read_text()).strip()], ids=relative)
def test_code_blocks_run(page: Path) -> None:
    # A fresh interpreter: a page may register plugins, set policy, and must import what it uses.
    source = code(page.read_text())
    script = f"exec(compile({source!r}, {relative(page)!r}, 'exec'), {{'__name__': '__main__'}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, cwd="/")
    assert done.returncode == 0, done.stderr


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", GENERATED)
def test_generated_page_is_up_to_date(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == generator().PAGES[name](), "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_relative_links_resolve(page: Path) -> None:
    targets = [target.split("#")[0] for target in LINK.findall(page.read_text()) if "://" not in target]
    broken = [target for target in targets if target and not (page.parent / target).exists()]
    assert not broken


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/structure.md"])
def test_named_files_exist(page: str) -> None:
    named = set(re.findall(r"`((?:hal|ops|backends|serving|docs|tests)/[\w./-]+)`", (ROOT / page).read_text()))
    assert named and not [path for path in named if not (ROOT / path).exists()]
