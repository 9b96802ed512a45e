"""In a real browser: `kvlab lab` opens, lesson 04 runs, sliders redraw one picture, a check fails and then passes.

Of lessons 06 to 09 only the cells run that a widget needs: what they measure takes a minute each.

Needs Chromium (KVLAB_CHROMIUM, or on the PATH) and playwright; skipped without them unless KVLAB_REQUIRE_BROWSER is
set. Screenshots go to artifacts/browser/.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from kvlab.lab import notebooks

ROOT = Path(__file__).resolve().parents[2]
SHOTS = ROOT / "artifacts" / "browser"
TOKEN = "kvlab-browser-test"
FAILED_OUTPUT = '[data-mime-type="application/vnd.jupyter.error"], [data-mime-type="application/vnd.jupyter.stderr"]'


def chromium():
    return os.environ.get("KVLAB_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


def missing(what):
    if os.environ.get("KVLAB_REQUIRE_BROWSER"):
        pytest.fail(what)
    pytest.skip(what)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A running `kvlab lab` on a fresh folder; yields its address."""
    folder = tmp_path_factory.mktemp("lab")
    settings = folder / "settings" / "@jupyterlab" / "notebook-extension" / "tracker.jupyterlab-settings"
    settings.parent.mkdir(parents=True)
    # All cells in the page, not only those on the screen: the test looks at all outputs.
    settings.write_text(json.dumps({"windowingMode": "none"}), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = {f"JUPYTER_{name}_DIR": str(folder / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    environment = {
        **os.environ, **places, "PYTHONPATH": str(ROOT), "KVLAB_AUTO": "1", "JUPYTER_TOKEN": TOKEN,
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"), "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
    }  # fmt: skip
    with (folder / "log").open("w", encoding="utf-8") as log:
        command = [sys.executable, "-c", "from kvlab.cli import main; main()", "lab"]
        server = subprocess.Popen(
            [*command, "--no-browser", "--port", str(port), "--dir", str(folder / "mine")],
            cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
        try:
            _wait_for(f"http://127.0.0.1:{port}/api/status?token={TOKEN}", server, folder / "log")
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(timeout=60)


def _wait_for(address, server, log):
    ends = time.monotonic() + 180
    while time.monotonic() < ends and server.poll() is None:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    pytest.fail(f"kvlab lab did not come up:\n{log.read_text(encoding='utf-8')[-3000:]}")


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium."""
    program = chromium()
    if not program:
        missing("no chromium on the PATH and no KVLAB_CHROMIUM")
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        missing("no playwright: pip install playwright")
    with sync_playwright() as playwright:
        # In a container Chromium runs as root, where its own sandbox does not work.
        running = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--headless=new"])
        yield running
        running.close()


@pytest.fixture
def open_notebook(lab, browser):
    """A function that opens a notebook of the learner's folder in a page of its own."""
    pages = []

    def open_path(path):
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        pages.append(page)
        page.set_default_timeout(300_000)  # on a busy machine too
        page.goto(f"{lab}/lab/tree/{path}?token={TOKEN}&reset")
        page.locator(".jp-NotebookPanel-notebook .jp-CodeCell").first.wait_for()
        # The toolbar says idle before there is a kernel; whoever runs a cell then is asked to choose one.
        page.get_by_text(re.compile(r"Python 3 \(kvlab\) \| Idle")).wait_for()
        return page

    yield open_path
    for page in pages:
        page.close()
    # A kernel stays when its page is closed, and keeps its model in memory.
    key = {"Authorization": f"token {TOKEN}"}
    with urllib.request.urlopen(urllib.request.Request(f"{lab}/api/kernels", headers=key), timeout=60) as answer:
        kernels = json.load(answer)
    for kernel in kernels:
        end = urllib.request.Request(f"{lab}/api/kernels/{kernel['id']}", headers=key, method="DELETE")
        with urllib.request.urlopen(end, timeout=60):
            pass


def run_all(page, timeout_s):
    page.locator(".lm-MenuBar-item", has_text=re.compile("^Run$")).click()
    page.locator('.lm-Menu-item[data-command="runmenu:run-all"]').click()
    # Asked from here, not by the page: its own timers stand still while the kernel keeps both cores busy.
    prompts = "[...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].map(e => e.textContent)"
    ends = time.monotonic() + timeout_s
    while not (texts := page.evaluate(prompts)) or not all(re.search(r"\[\d+\]", text) for text in texts):
        assert time.monotonic() < ends, f"still running after {timeout_s} s: {texts}"
        time.sleep(2)


def picture(cell):
    """(source, width, height) of the only picture in a cell's output."""
    images = cell.locator(".jp-OutputArea-output img")
    assert images.count() == 1, "one picture, updated in place"
    return tuple(images.first.evaluate("e => [e.src, e.naturalWidth, e.naturalHeight]"))


def move_first_slider(page, cell, shots):
    """Twenty steps to the left: another picture of the same size in the same place. Screenshots before and after."""
    cell.scroll_into_view_if_needed()
    page.screenshot(path=SHOTS / f"{shots}.png")
    before = picture(cell)
    height = cell.bounding_box()["height"]
    handle = cell.locator(".noUi-handle").first
    handle.focus()
    for _ in range(20):  # more than a block of 16 tokens, where a slider counts tokens
        handle.press("ArrowLeft")
        page.wait_for_timeout(100)
    page.wait_for_timeout(2000)
    after = picture(cell)
    cell.scroll_into_view_if_needed()
    page.screenshot(path=SHOTS / f"{shots}_moved.png")
    assert after[0] != before[0], "the picture did not change"
    assert after[1:] == before[1:], "the picture changed its size"
    assert abs(cell.bounding_box()["height"] - height) < 2, "the page jumped"
    assert page.locator(FAILED_OUTPUT).count() == 0


def test_lesson_04_runs_in_jupyterlab_and_its_sliders_redraw_one_picture(open_notebook):
    page = open_notebook("lessons/04_flip.ipynb")
    run_all(page, timeout_s=500)
    assert page.locator(FAILED_OUTPUT).count() == 0
    assert page.locator(".jp-OutputArea-output img").count() >= 1
    assert page.locator(".Toastify__toast", has_text="news").count() == 0, "JupyterLab asks about its news"
    move_first_slider(page, page.locator(".jp-CodeCell", has=page.locator(".widget-slider")).first, "lesson_04")


@pytest.mark.parametrize(
    ("lesson", "needed"),
    [
        ("06_same", ["setup", "notes", "others", "names"]),
        ("07_overlap", ["setup", "layers"]),
        ("08_evict", ["setup", "saving"]),
        ("09_cluster", ["setup", "queue"]),
    ],
)
def test_a_slider_redraws_one_picture_in_the_later_lessons(open_notebook, lesson, needed):
    ids = [cell.id for cell in notebooks.read(ROOT / "lessons" / f"{lesson}.ipynb").cells]
    page = open_notebook(f"lessons/{lesson}.ipynb")
    for name in needed:
        cell = page.locator(".jp-Notebook-cell").nth(ids.index(name))
        run(cell)
    move_first_slider(page, cell, f"lesson_{lesson[:2]}")


def test_an_exercise_shows_a_failing_and_then_a_passing_check(open_notebook):
    task = "break_even_gb_per_s"
    solution = notebooks.read(ROOT / "solutions" / "00_start.ipynb")
    answer = next(cell.source for cell in solution.cells if cell.id == f"{task}-answer")
    page = open_notebook("exercises/00_start.ipynb")
    check = page.locator(".jp-CodeCell", has=page.locator(".cm-content", has_text=f"check.{task}(")).first
    cell = page.locator(".jp-CodeCell", has=page.locator(".cm-content", has_text=f"def {task}(")).first
    start = page.locator(".jp-CodeCell", has=page.locator(".cm-content", has_text="check.learner(")).first
    for each in (start, cell, check):
        run(each)
    check.get_by_text(f"not yet: {task}").wait_for()
    check.scroll_into_view_if_needed()
    page.screenshot(path=SHOTS / "exercise_fails.png")
    assert "Traceback" not in check.inner_text()
    cell.locator(".cm-content").click()
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(answer)
    for each in (cell, check):
        run(each)
    check.get_by_text(f"passed: {task}").wait_for()
    check.scroll_into_view_if_needed()
    page.screenshot(path=SHOTS / "exercise_passes.png")
    assert check.get_by_text("not yet").count() == 0


def run(cell):
    """Run one cell as a person does and wait until it has ended."""
    cell.locator(".cm-content").click()
    cell.page.keyboard.press("Control+Enter")
    cell.locator(".jp-InputPrompt", has_text=re.compile(r"\[\d+\]")).wait_for()
