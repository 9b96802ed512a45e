"""`kvlab lab`: a learner's copy has everything, spoils nothing, is trusted, and is never overwritten."""

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from typer.testing import CliRunner

pytest.importorskip("jupyterlab")
from jupyter_client.kernelspec import KernelSpecManager
from nbformat.sign import NotebookNotary

from kvlab.cli import app
from kvlab.cli.doctor import examine_lab
from kvlab.lab import notebooks, start
from kvlab.lab.course import Course
from kvlab.lab.course import course as real_course

ROOT = Path(__file__).resolve().parent.parent


def lesson(secret):
    measured = new_code_cell("measure()", id="m", metadata={"tags": ["measure"]}, execution_count=2)
    measured.outputs = [new_output("stream", text=secret)]
    drawn = new_code_cell("draw()", id="d", execution_count=1)
    drawn.outputs = [new_output("execute_result", {"text/html": "<b>first frame</b>"}, execution_count=1)]
    return new_notebook(cells=[new_markdown_cell("# Why?", id="t"), drawn, measured])


@pytest.fixture
def course(tmp_path, monkeypatch):
    """Two lessons with exercises; signatures go to a database of the test's own."""
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    for name in ("00_start", "04_flip"):
        notebooks.write(lesson(f"{name}: 24 MB/s"), tmp_path / "course" / "lessons" / f"{name}.ipynb")
        task = new_code_cell("def f(): ...", id="a")
        notebooks.write(new_notebook(cells=[task]), tmp_path / "course" / "exercises" / f"{name}.ipynb")
    return Course(tmp_path / "course" / "lessons", tmp_path / "course" / "exercises")


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_a_learner_gets_every_notebook_without_spoilers_and_trusted(course, tmp_path):
    mine = tmp_path / "mine"
    assert len(start.add_missing(course, mine)) == 4
    kinds = ("exercises", "lessons")
    assert names(mine) == [f"{kind}/{name}.ipynb" for kind in kinds for name in ("00_start", "04_flip")]
    for path in (mine / "lessons").iterdir():
        text = path.read_text(encoding="utf-8")
        assert "24 MB/s" not in text
        assert "first frame" in text
        assert NotebookNotary().check_signature(nbformat.read(path, as_version=4)), "JupyterLab would hide its outputs"


def test_what_a_learner_wrote_is_never_touched(course, tmp_path):
    mine = tmp_path / "mine"
    start.add_missing(course, mine)
    work = mine / "exercises" / "04_flip.ipynb"
    work.write_text("not even JSON any more", encoding="utf-8")
    (mine / "lessons" / "00_start.ipynb").unlink()
    notebooks.write(lesson(""), course.lessons / "05_pages.ipynb")
    added = start.add_missing(course, mine)
    assert sorted(path.name for path in added) == ["00_start.ipynb", "05_pages.ipynb"], "the deleted and the new one"
    start.fresh_copies(course, mine, "4")
    start.fresh_copies(course, mine, "04_flip")
    assert work.read_text(encoding="utf-8") == "not even JSON any more"
    fresh = [name for name in names(mine) if "fresh" in name]
    assert fresh == [f"{kind}/04_flip.fresh-{n}.ipynb" for kind in ("exercises", "lessons") for n in (1, 2)]
    assert "24 MB/s" not in (mine / "lessons" / "04_flip.fresh-2.ipynb").read_text(encoding="utf-8")


def test_a_lesson_that_is_not_there_is_one_line(course, tmp_path):
    with pytest.raises(ValueError, match="no lesson '7'; the lessons are 00_start, 04_flip"):
        start.fresh_copies(course, tmp_path, "7")
    result = CliRunner().invoke(app, ["lab", "--dir", str(tmp_path / "x"), "--reset", "nine"])
    assert result.exit_code == 2
    assert "there is no lesson 'nine'" in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_notebooks_kernel_is_the_python_that_runs_kvlab(tmp_path):
    environment = start.jupyter_environment(tmp_path / "kernels")
    # As a user whose own "python3" is another one, installed where Jupyter looks.
    other = tmp_path / "data" / "kernels" / "python3"
    other.mkdir(parents=True)
    (other / "kernel.json").write_text(
        json.dumps({"argv": ["/usr/bin/other-python"], "language": "python"}), encoding="utf-8"
    )
    code = "from jupyter_client.kernelspec import *; print(KernelSpecManager().get_kernel_spec('python3').argv[0])"
    found = subprocess.run(
        [sys.executable, "-c", code], env={**environment, "JUPYTER_DATA_DIR": str(tmp_path / "data")}, cwd=tmp_path,
        capture_output=True, text=True, encoding="utf-8", check=True,
    )  # fmt: skip
    assert found.stdout.strip() == sys.executable
    code = "import kvlab.lab; print(kvlab.__file__)"
    where = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert where.stdout.strip() == str(ROOT / "kvlab" / "__init__.py"), "a kernel in any folder finds this kvlab"


def test_jupyterlab_fetches_no_news_unless_the_user_has_said_so(tmp_path):
    environment = start.jupyter_environment(tmp_path / "place")
    code = (
        "import json, jupyterlab, pathlib; from jupyterlab_server.settings_utils import get_settings;"
        "schemas = pathlib.Path(jupyterlab.__file__).parent / 'schemas';"
        "name = '@jupyterlab/apputils-extension:notification';"
        "schema = get_settings('none', str(schemas), 'none', name)[0]['schema']['properties'];"
        "print(schema['fetchNews']['default'], schema['checkForUpdates']['default'])"
    )
    for settings, says in ((environment, "false False"), (dict(os.environ), "none True")):
        found = subprocess.run(
            [sys.executable, "-c", code], env=settings, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert found.stdout.strip() == says


def test_jupyter_opens_the_first_lesson_in_the_learners_folder(course, tmp_path):
    start.add_missing(course, tmp_path / "mine")
    command = start.jupyter_command(tmp_path / "mine", browser=False, port=8123)
    assert f"--ServerApp.root_dir={tmp_path / 'mine'}" in command
    assert "--LabApp.default_url=/lab/tree/lessons/00_start.ipynb" in command
    assert {"--no-browser", "--ServerApp.port=8123"} <= set(command)


def test_without_jupyterlab_one_line_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("kvlab.cli.lab.find_spec", lambda name: None if name == "jupyterlab" else True)
    result = CliRunner().invoke(app, ["lab"])
    assert result.exit_code == 2
    assert result.stderr == "kvlab: the lab needs JupyterLab and ipywidgets: pip install 'kvlab[lab]'\n"


def test_doctor_says_what_the_lab_lacks_and_what_that_means(tmp_path, monkeypatch):
    facts, findings = examine_lab()
    assert facts["jupyterlab"][0].isdigit()
    assert not any("is missing" in finding for finding in findings)
    assert facts["python3 kernel"] in ("python", "python3", sys.executable) or "kernel 'python3' is" in str(findings)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("jupyter_core.paths.jupyter_path", lambda *parts: [str(tmp_path)])
    kernel = tmp_path / "kernels" / "python3" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    kernel.write_text(json.dumps({"argv": ["/opt/other/python"], "language": "python"}), encoding="utf-8")
    monkeypatch.setattr(KernelSpecManager, "kernel_dirs", [str(tmp_path / "kernels")])
    _, findings = examine_lab()
    text = "\n".join(findings)
    assert "/opt/other/python, not the Python that runs kvlab" in text
    assert "sliders show as text" in text
    assert "No chromium" in text


def test_this_checkout_brings_lessons_and_exercises_but_no_way_to_solutions():
    here = real_course()
    assert here.lessons == ROOT / "lessons"
    assert here.exercises == ROOT / "exercises"
    assert not any("solution" in str(value) for value in vars(here).values())
    assert os.pathsep not in str(here.exercises)
