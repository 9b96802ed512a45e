"""The pytest plugin under which nbval runs a submission (`pytest -p kvlab.lab.grading_plugin --nbval-lax …`).

It writes one JSON line per code cell: how the cell ended, and the answers that it displayed. It judges nothing. It
keeps little of what a cell prints, notices at once when a kernel dies, and turns off what a notebook could tell nbval.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import nbval.plugin
import pytest
from nbval.kernel import RunningKernel

from kvlab.lab import sandbox

__all__ = ["WatchedKernel"]

# As `task.ANSWERS_MIME`, which is not loaded here: that would load all of IPython.
_ANSWERS_MIME = "application/vnd.kvlab.answers+json"
# More than this of what one cell prints is dropped, but for its answers.
_KEPT_CHARACTERS = 100_000
_ANSWER_CHARACTERS = 2_000_000
_TEXT_CHARACTERS = 2_000
_LOOK_S = 0.25
_START_S = 300


class KernelDied(RuntimeError):  # noqa: N818  (the cell's end, read by its name below)
    """The kernel's process is gone."""


class WatchedKernel(RunningKernel):  # type: ignore[misc]  # nbval has no types
    """nbval's kernel, with bounded output and an eye on the process. `late`, `answers`, `dropped`: of the last cell."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.forget()
        self._sent = ""
        super().__init__(*args, **kwargs)
        # Loading the lab is not the learner's time.
        try:
            self.await_reply(self.execute_cell_input("import kvlab.lab.check"), timeout=_START_S)
        except Empty as error:
            raise KernelDied(f"the lab did not load within {_START_S} s; grade fewer notebooks at a time") from error

    def forget(self) -> None:
        """What the cell before did is not this one's."""
        self.late = False
        self.dropped = 0
        self.answers: str | None = None
        self._replies: set[str] = set()
        self._waiting: deque[Any] = deque()
        self._left = _KEPT_CHARACTERS

    def execute_cell_input(self, cell_input: str, allow_stdin: bool | None = None) -> Any:
        """Send the code of the next cell."""
        self.forget()
        self._sent = super().execute_cell_input(cell_input, allow_stdin)
        return self._sent

    def await_reply(self, msg_id: str, timeout: float | None = None) -> None:
        """Wait for the cell's end; meanwhile take in what it prints. Raises Empty when late, KernelDied when dead."""
        ends = time.monotonic() + (timeout or 0)
        while True:
            self._take_in()
            if self._has_replied(msg_id, _LOOK_S):
                return
            self._require_life()
            if timeout and time.monotonic() > ends:
                self.late = True
                raise Empty

    def _has_replied(self, msg_id: str, wait_s: float) -> bool:
        try:
            message = self.kc.get_shell_msg(timeout=wait_s)
        except Empty:
            return msg_id in self._replies
        self._replies.add(message["parent_header"].get("msg_id"))
        return msg_id in self._replies

    def get_message(self, stream: str, timeout: float | None = None) -> Any:
        """The next message; from iopub, bounded. Raises Empty."""
        if stream != "iopub":
            return super().get_message(stream, timeout)
        quiet, ends = time.monotonic() + 1, time.monotonic() + (timeout or 0)
        while not self._waiting:
            self._take_in(_LOOK_S)
            if not self._waiting:
                self._require_life()
                if self._has_replied(self._sent, 0) and time.monotonic() > quiet:
                    # The cell has ended; its last word got lost among too many others.
                    return _idle(self._sent)
                if time.monotonic() > ends:
                    raise Empty
        return self._waiting.popleft()

    def _require_life(self) -> None:
        if not self.is_alive():
            raise KernelDied("the kernel ended")

    def _take_in(self, wait_s: float = 0) -> None:
        """Move what has arrived from the socket to here, as far as it is kept; a second at most."""
        ends = time.monotonic() + 1
        while time.monotonic() < ends:
            try:
                message = self.kc.get_iopub_msg(timeout=wait_s)
            except Empty:
                return
            wait_s = 0
            content = message["content"]
            data = content.get("data")
            answers = data.pop(_ANSWERS_MIME, None) if isinstance(data, dict) else None
            if isinstance(answers, str) and len(answers) <= _ANSWER_CHARACTERS:
                self.answers = answers
            if message["msg_type"] != "status":
                size = len(str(content))
                if size > self._left:
                    self.dropped += size
                    continue
                self._left -= size
            self._waiting.append(message)


def _idle(msg_id: str) -> dict[str, Any]:
    return {"msg_type": "status", "content": {"execution_state": "idle"}, "parent_header": {"msg_id": msg_id}}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the lines go, and what the child may use."""
    group = parser.getgroup("kvlab")
    group.addoption("--kvlab-results", type=Path)
    for name in ("cpu-s", "memory-bytes", "file-bytes"):
        group.addoption(f"--kvlab-{name}", type=int)


def pytest_configure(config: pytest.Config) -> None:
    """Confine the process before a kernel starts; a notebook's own wishes to nbval (skip, expect errors) are void."""
    sandbox.confine(
        config.getoption("--kvlab-cpu-s"),
        config.getoption("--kvlab-memory-bytes"),
        config.getoption("--kvlab-file-bytes"),
    )
    nbval.plugin.RunningKernel = WatchedKernel
    nbval.plugin.comment_markers.clear()
    nbval.plugin.metadata_tags.clear()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: Any) -> None:
    """A cell that was late does not speak for the next one."""
    item.parent.timed_out = False
    if item.parent.kernel is not None:
        item.parent.kernel.forget()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: pytest.CallInfo[None]) -> Iterator[Any]:
    """Write the cell's line once it has run (or could not)."""
    report = yield
    if call.when == "call" or (call.when == "setup" and call.excinfo):
        with item.config.getoption("--kvlab-results").open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(_line(item, call)) + "\n")
    return report


def _line(item: Any, call: pytest.CallInfo[None]) -> dict[str, Any]:
    kernel = item.parent.kernel
    line: dict[str, Any] = {"cell": item.cell_num, "end": "ok", "error": "", "answers": None}
    if kernel is None:
        return {**line, "end": "unstarted", "error": str(call.excinfo.value if call.excinfo else "")[:_TEXT_CHARACTERS]}
    line["answers"] = kernel.answers
    if call.excinfo:
        errors = [output for output in item.test_outputs or () if output.output_type == "error"]
        said = f"{errors[-1].ename}: {errors[-1].evalue}" if errors else f"{call.excinfo.value}"
        late, dead = kernel.late, not kernel.is_alive()
        line |= {"end": "late" if late else "died" if dead else "error", "error": said[:_TEXT_CHARACTERS]}
    return line


def pytest_unconfigure() -> None:
    """Nothing that a notebook started outlives it."""
    sandbox.end_descendants()
