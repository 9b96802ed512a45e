"""The plan of the house holds: floors import downwards only, one place knows CUDA, README and CI run the same tests."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "kvlab"

# Floor by module (a package counts for everything in it). A module that is missing here fails the test.
FLOORS = {
    **dict.fromkeys(("units", "layers", "arch", "arithmetic", "curve", "machine"), 1),
    **dict.fromkeys(("crossings", "split", "verdict", "storing"), 1),
    **dict.fromkeys(("plan", "settings", "waiting", "pipeline"), 1),
    **dict.fromkeys(("blocks", "fingerprint", "prefix"), 1),
    "hf": 1,
    **dict.fromkeys(("memory", "jobs", "pool", "streams", "adversaries", "transfer", "pending", "reload", "tiers"), 2),
    **dict.fromkeys(("model", "graphs", "attention", "linear", "rope", "adapter"), 3),
    **dict.fromkeys(("loading", "weights", "hub", "tokenizer", "gguf_file"), 3),
    **dict.fromkeys(("request", "policy", "executor", "torch_executor"), 4),
    **dict.fromkeys(("cache", "counts", "loads", "scheduler", "engine", "simulate"), 4),
    **dict.fromkeys(("experiments", "records", "server"), 5),
    **dict.fromkeys(("cli", "lab", "bridges"), 6),
}
# Module-level imports that floor 1 must not have.
NOT_ON_FLOOR_1 = {"torch", "numpy", "time", "typer", "rich", "matplotlib"}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def noun(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def is_module(name: str) -> bool:
    place = ROOT.joinpath(*name.split("."))
    return place.is_dir() or place.with_suffix(".py").is_file()


def imports(path: Path) -> set[str]:
    """Dotted names of the modules that a file imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            # `from package import module` names the module; only other names come from the package itself.
            modules_named = {name for name in inner if is_module(name)}
            found |= modules_named | ({node.module} if inner - modules_named else set())
    return found


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_a_module_imports_from_its_own_floor_or_below(path):
    assert noun(path) in FLOORS, f"{dotted(path)} has no floor: add it to FLOORS"
    floor = FLOORS[noun(path)]
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "kvlab" and len(parts) > 1 and parts[1] in FLOORS:
            assert FLOORS[parts[1]] <= floor, f"{dotted(path)}, floor {floor}, imports {name}, floor {FLOORS[parts[1]]}"
    if floor == 1:
        bad = {name.split(".")[0] for name in imports(path)} & NOT_ON_FLOOR_1
        assert not bad, f"{dotted(path)} is on floor 1 and imports {bad}"


def test_there_are_no_import_circles():
    known = {dotted(path): path for path in modules()}
    edges = {
        name: {target for target in imports(path) if target in known and target != name} for name, path in known.items()
    }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"circle: {' -> '.join((*trail[trail.index(name) :], name))}"
        if name not in done:
            for target in edges[name]:
                visit(target, (*trail, name))
            done.add(name)

    for name in known:
        visit(name, ())


def test_only_streams_knows_cuda_streams_and_events():
    for path in modules():
        text = path.read_text(encoding="utf-8")
        if path.name != "streams.py":
            for forbidden in ("cuda.Stream", "cuda.Event", "cuda.stream", "wait_event", "record_stream"):
                assert forbidden not in text, f"{path} uses {forbidden}"


def test_importing_kvlab_does_not_import_torch():
    code = "import sys, kvlab; assert 'torch' not in sys.modules; kvlab.decide; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_readme_and_ci_run_the_same_commands():
    """.ci/run must be what users are told to run."""
    readme, ci = (ROOT / "README.md").read_text(encoding="utf-8"), (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    install = ".venv/bin/pip install -c constraints.txt -e '.[lab,test]'"
    assert f"{install} && .venv/bin/kvlab crossover" in readme
    assert f"{install} && .venv/bin/pytest" in readme
    assert f"{install} && .venv/bin/pytest" in ci


def test_files_stay_readable():
    for path in modules():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= 450, f"{path} has {lines} lines: split it by noun"


def test_every_text_file_is_opened_as_utf8():
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                named = {keyword.arg for keyword in node.keywords}
                if node.func.attr in ("read_text", "write_text"):
                    assert "encoding" in named, f"{path}:{node.lineno} has no encoding"


@pytest.mark.parametrize("tool", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]], ids=" ".join)
def test_lint_format_and_types(tool, tool_runs):
    run = tool_runs[" ".join(tool)]
    said, _ = run.communicate()
    assert run.returncode == 0, said
