"""Does an answer call the library instead of working it out? Read from the source, never run.

Follows names: what is bound from kvlab, or from something that was, counts as kvlab's wherever an answer uses it. This
finds honest short cuts and simple tricks; that the kernel being graded holds no answers is the other half.
"""

from __future__ import annotations

import ast
import symtable
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

__all__ = ["parse", "reaches_answers", "uses_kvlab"]

# With these a name can be reached that the source does not spell.
_ROUNDABOUT = {
    "__import__", "__builtins__", "builtins", "ctypes", "eval", "exec", "gc", "get_ipython", "globals", "importlib",
    "inspect", "multiprocessing", "pkgutil", "runpy", "subprocess",
}  # fmt: skip
_ROUNDABOUT_ATTRIBUTES = {
    "modules", "_getframe", "_current_frames", "f_back", "f_globals", "f_locals", "__builtins__", "__globals__",
    "__loader__", "__subclasses__",
}  # fmt: skip
# Where kvlab keeps what is right.
_ANSWER_NAMES = frozenset(("TASKS", "BY_LESSON", "answer", "mistakes"))


@dataclass
class _Statement:
    """One top-level statement: the notebook's names that it binds and uses, and what else it spells."""

    binds: set[str] = field(default_factory=set)
    uses: set[str] = field(default_factory=set)
    imports: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    texts: list[str] = field(default_factory=list)


def parse(source: str) -> list[ast.stmt]:
    """The cell's statements, with %magics and !commands as the calls they stand for; none when it is not Python."""
    from IPython.core.inputtransformer2 import TransformerManager

    try:
        return ast.parse(TransformerManager().transform_cell(source)).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def uses_kvlab(
    cells: Sequence[str], answers: Collection[int], given: Collection[int] = (), checks: Collection[int] = ()
) -> str | None:
    """What the answer cells take from kvlab, as a phrase; None when nothing.

    `cells`: all code cells in order; `answers`: the indices of the cells that hold the answer; `given`: of cells that
    stand as the exercise has them: values that those hand out (not their imports) are meant to be used. `checks`: of
    cells that are the grader's own.
    """
    statements = {
        index: [_read(statement) for statement in parse(source)]
        for index, source in enumerate(cells)
        if index not in checks
    }
    tainted: set[str] = set()
    while True:
        before = len(tainted)
        for index, found in statements.items():
            for statement in found:
                if index in given and not statement.imports:
                    continue
                if _phrase(statement, tainted):
                    tainted |= statement.binds
        if len(tainted) == before:
            break
    for index in sorted(answers):
        for statement in statements[index]:
            phrase = _phrase(statement, tainted - statement.binds)
            if phrase:
                return phrase
    return None


def reaches_answers(cells: Sequence[str]) -> int | None:
    """The index of the first cell that reads kvlab's own answers (`kvlab.lab.tasks`, `check.some_task.answer`)."""
    kvlab: set[str] = set()
    for index, source in enumerate(cells):
        for statement in map(_read, parse(source)):
            if any(f"{name}.".startswith("kvlab.lab.tasks.") for name in statement.imports):
                return index
            if any("kvlab.lab.tasks" in text for text in statement.texts):
                return index
            if _from_kvlab(statement, kvlab):
                kvlab |= statement.binds
                if _ANSWER_NAMES & (statement.attributes | statement.uses):
                    return index
    return None


def _from_kvlab(statement: _Statement, tainted: set[str]) -> bool:
    return bool(_kvlab_imports(statement) or statement.uses & tainted or any("kvlab" in t for t in statement.texts))


def _kvlab_imports(statement: _Statement) -> set[str]:
    return {name for name in statement.imports if name.split(".")[0] == "kvlab"}


def _phrase(statement: _Statement, tainted: set[str]) -> str | None:
    imports, names = _kvlab_imports(statement), statement.uses & tainted
    roundabout = (statement.uses | {name.split(".")[0] for name in statement.imports}) & _ROUNDABOUT
    roundabout |= statement.attributes & _ROUNDABOUT_ATTRIBUTES
    if imports:
        return f"imports {min(imports)}"
    if names:
        return f"uses {min(names)!r}, which leads to kvlab"
    if any("kvlab" in text for text in statement.texts):
        return "spells 'kvlab' in a text"
    return f"uses {min(roundabout)!r}, with which any module can be reached" if roundabout else None


def _read(statement: ast.stmt) -> _Statement:
    found = _Statement()
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(statement)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(statement):
        if isinstance(node, ast.Import):
            found.imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.imports |= {f"{node.module or ''}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.attributes.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            found.texts.append(node.value)
    try:
        _names(symtable.symtable(ast.unparse(statement), "cell", "exec"), found)
    except (SyntaxError, RecursionError, ValueError):
        # Not a statement by itself (return, await): it cannot define an answer either, so no name is bound.
        found.uses |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    return found


def _names(table: symtable.SymbolTable, found: _Statement) -> None:
    """Names of the notebook that a scope binds or uses; parameters and locals are nobody else's."""
    top = table.get_type() == "module"
    for symbol in table.get_symbols():
        shared = top or symbol.is_global()
        if shared and (symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()):
            found.binds.add(symbol.get_name())
        if shared and symbol.is_referenced():
            found.uses.add(symbol.get_name())
    for child in table.get_children():
        _names(child, found)


def bound(statement: ast.stmt) -> set[str]:
    """The names that a top-level statement binds in its notebook."""
    return _read(statement).binds
