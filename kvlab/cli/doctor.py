"""`kvlab doctor`: what this machine has, and what that means for the lab."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from kvlab.cli.console import out


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False,
    directory: Annotated[
        Path | None, typer.Option(help="The folder whose disk is looked at; default: the temporary one.")
    ] = None,
) -> None:
    """Say what this machine has (torch, accelerator, pinned memory, NUMA, disk, Jupyter) and what that means."""
    facts, findings = examine(directory or Path(tempfile.gettempdir()))
    if as_json:
        print(json.dumps({"facts": facts, "findings": findings}, indent=1))  # noqa: T201
        return
    for name, value in facts.items():
        out.print(f"{name:18} {value}", markup=False, soft_wrap=True)
    out.print()
    for finding in findings:
        out.print(f"- {finding}", markup=False, soft_wrap=True)


def examine(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """The machine facts, and one sentence for each that changes what a learner will see."""
    import torch

    from kvlab import weights
    from kvlab.loading import cpu_gflops_per_s, resolve_dtype
    from kvlab.records import machine_facts
    from kvlab.units import format_bytes

    has_cuda = torch.cuda.is_available()
    device = "cuda" if has_cuda else "cpu"
    facts = machine_facts(device)
    findings = []
    dtype = resolve_dtype("auto", torch.device("cpu"))
    facts["cpu GFLOP/s"] = ", ".join(f"{name} {rate:.0f}" for name, rate in cpu_gflops_per_s().items())
    findings.append(
        f"On the CPU kvlab computes in {dtype} here; it takes bf16 where that is clearly faster than fp32"
        f" ({facts['cpu GFLOP/s']} GFLOP/s)."
    )
    if has_cuda:
        facts["pinned memory"] = _pinned()
        findings.append(
            f"CUDA works: --device cuda runs live on {facts['gpu']}; pinned memory: {facts['pinned memory']}."
        )
    else:
        findings.append(
            "No CUDA device: lessons run live on the CPU and show recorded or published GPU figures, labelled."
        )
        if torch.backends.mps.is_available():
            findings.append("An Apple GPU is here, but kvlab does not support mps: it runs on the CPU.")
    if (facts["numa_nodes"] or 1) > 1:
        findings.append(
            f"{facts['numa_nodes']} NUMA nodes: bind the process to one (numactl) before trusting a bandwidth."
        )
    facts["disk free"] = f"{format_bytes(shutil.disk_usage(folder).free)} at {folder}"
    can_drop = hasattr(os, "posix_fadvise") and Path("/proc/self/io").exists()
    facts["cold reads"] = "can be proven" if can_drop else "cannot be proven"
    if not can_drop:
        findings.append(
            "This system does not say what was read from the device: disk results will say 'cold: unproven'."
        )
    cached = weights.locate("smollm2-135m") is not None
    facts["SmolLM2-135M"] = "in the cache" if cached else "not fetched"
    if not cached:
        findings.append("SmolLM2-135M is not here yet: `kvlab model get smollm2-135m` fetches 93 MB once.")
    lab_facts, lab_findings = examine_lab()
    return {**facts, **lab_facts}, findings + lab_findings


# What the lab needs, and what does not work without it.
_LAB = {
    "matplotlib": "no charts",
    "jupyterlab": "`kvlab lab` cannot start",
    "ipykernel": "no notebook can run",
    "ipywidgets": "the lessons' pictures have no sliders",
    "nbval": "`kvlab grade` cannot run notebooks",
}


def examine_lab() -> tuple[dict[str, Any], list[str]]:
    """What is here of Jupyter, and one sentence for each thing that is missing or would surprise a learner."""
    from importlib import metadata

    facts: dict[str, Any] = {}
    findings = []
    for name, loss in _LAB.items():
        facts[name] = metadata.version(name) if importlib.util.find_spec(name) else "not installed"
        if facts[name] == "not installed":
            findings.append(f"{name} is missing: {loss} (pip install 'kvlab[lab]').")
    if importlib.util.find_spec("jupyter_core"):
        facts["slider extension"] = _slider_extension()
        if facts["slider extension"] == "not found" and facts["ipywidgets"] != "not installed":
            findings.append(
                "JupyterLab does not see the extension of ipywidgets: sliders show as text. "
                "Install both in one environment."
            )
    if importlib.util.find_spec("jupyter_client"):
        facts["python3 kernel"] = kernel = _kernel_interpreter()
        if not _same_interpreter(kernel):
            findings.append(
                f"Jupyter's kernel 'python3' is {kernel}, not the Python that runs kvlab: start notebooks "
                "with `kvlab lab`, which uses this one."
            )
    facts["chromium"] = shutil.which("chromium") or shutil.which("chromium-browser") or "not found"
    if facts["chromium"] == "not found":
        findings.append("No chromium on the PATH: that only matters for kvlab's own browser tests.")
    return facts, findings


def _slider_extension() -> str:
    from jupyter_core.paths import jupyter_path

    places = (Path(folder) / "@jupyter-widgets" / "jupyterlab-manager" for folder in jupyter_path("labextensions"))
    return next((str(place) for place in places if place.is_dir()), "not found")


def _kernel_interpreter() -> str:
    """The program that a notebook's kernel name, python3, starts."""
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    try:
        return str(KernelSpecManager().get_kernel_spec("python3").argv[0])
    except NoSuchKernel:
        return "not found"


def _same_interpreter(program: str) -> bool:
    # jupyter_client starts a bare "python" with its own interpreter.
    return program in ("python", "python3", sys.executable) or Path(program).resolve() == Path(sys.executable).resolve()


def _pinned() -> str:
    import torch

    try:
        torch.empty(2**24, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        return f"not available ({str(error).splitlines()[0]}); transfers fall back to pageable memory"
    return "works"
