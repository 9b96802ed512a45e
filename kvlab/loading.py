"""From a name to a model that runs: which device, which dtype, which weights, which tokenizer.

Knows presets, folders, GGUF files and hub ids. Does not know how the model computes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from pathlib import Path

import torch
import torch.nn.functional as F

from kvlab import tokenizer as tokenizers
from kvlab import weights as weights_module
from kvlab.arch import ModelArch, preset_names
from kvlab.gguf_file import GgufFile
from kvlab.memory import check_fits
from kvlab.model import Model
from kvlab.pool import TORCH_DTYPES
from kvlab.rope import rope_for
from kvlab.tokenizer import ByteTokenizer, Tokenizer
from kvlab.weights import LazyTensors

__all__ = ["cpu_gflops_per_s", "default_text", "load_default_model", "load_model", "resolve_device", "resolve_dtype"]

_CLEARLY = 1.2  # bf16 instructions give about twice the rate of fp32


@lru_cache(maxsize=1)
def cpu_gflops_per_s() -> dict[str, float]:
    """GFLOP/s of a prefill-sized matrix product on this CPU, by dtype (fp32, bf16); measured once a process, in ms.

    CPUs without bf16 instructions emulate them several times slower than fp32. The two take turns, so that what else
    runs on the machine slows both.
    """
    rows, inner, outer = 128, 576, 1536
    runs: dict[str, list[float]] = {"fp32": [], "bf16": []}
    for _ in range(7):
        for name, seconds in runs.items():
            x, w = (torch.ones(n, inner, dtype=TORCH_DTYPES[name]) for n in (rows, outer))
            began = time.perf_counter()
            F.linear(x, w)
            seconds.append(time.perf_counter() - began)
    return {name: 2 * rows * inner * outer / min(seconds) / 1e9 for name, seconds in runs.items()}


def resolve_device(device: str | torch.device) -> torch.device:
    """Read "auto", "cpu", "cuda" or "cuda:N". Raises ValueError for one that is absent or untried."""
    if str(device) == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device {str(device)!r} is not known; kvlab runs on 'cpu' and 'cuda'") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {str(device)!r} is not supported; kvlab runs on 'cpu' and 'cuda'")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("device 'cuda' was asked for, but torch sees no CUDA device; use --device cpu")
        count = torch.cuda.device_count()
        if device.index is not None and device.index >= count:
            raise ValueError(f"device {str(device)!r} was asked for, but torch sees {count} of them, from cuda:0 on")
        return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    return device


def resolve_dtype(dtype: str, device: torch.device) -> str:
    """A dtype name; "auto" is fp32 on a CPU and bf16 where that is clearly faster, so that the next process takes the
    same one and finds what this one stored; on CUDA it is bf16, but fp16 where that is emulated.

    Raises ValueError.
    """
    if dtype == "auto":
        if device.type == "cuda":  # before compute capability 8 no bf16 units, nor fused attention for it
            return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"
        rates = cpu_gflops_per_s()
        return "bf16" if rates["bf16"] > _CLEARLY * rates["fp32"] else "fp32"
    if dtype not in TORCH_DTYPES:
        raise ValueError(f"dtype is {dtype!r}; expected auto, {', '.join(TORCH_DTYPES)}")
    return dtype


def load_model(
    source: str | Path | ModelArch, device: str | torch.device = "cpu", dtype: str = "auto", seed: int = 0
) -> Model:
    """Load a model to run.

    `source` is a known checkpoint ("smollm2-135m": fetched into the cache folder when it is not there), a preset name
    or a `ModelArch` (seeded random weights), a folder with config.json and safetensors, a .gguf file, or a hub id.
    `device` and `dtype` as in `resolve_device` and `resolve_dtype`; fp64 is for tests.
    Raises ValueError or OSError in one line for anything it cannot find, read or run.
    """
    device = resolve_device(device)
    dtype = resolve_dtype(dtype, device)
    arch, tensors, said, load_tokenizer = _find(source, seed)
    nbytes = weights_module.parameter_count(arch) * TORCH_DTYPES[dtype].itemsize
    check_fits(f"{arch.name} in {dtype}", nbytes, device)
    return Model(
        arch=arch,
        dtype=dtype,
        device=device,
        source=said,
        weights=weights_module.assemble(arch, tensors, TORCH_DTYPES[dtype], device),
        rope=rope_for(weights_module.decoder_of(arch), arch.max_positions, device),
        load_tokenizer=load_tokenizer,
    )


def load_default_model(
    device: str | torch.device = "auto", dtype: str = "auto", seed: int = 0, *, say: Callable[[str], None] = print
) -> Model:
    """The model of the lessons and of `--model auto`: SmolLM2-135M, or the built-in wide-kv where that cannot be had.

    `say` is told in a line that a download begins, or why random weights take its place. Arguments as in `load_model`.
    """
    name = "smollm2-135m"
    if weights_module.locate(name) is None:
        try:
            say(f"fetching SmolLM2-135M-Instruct once (93 MB; kvlab model get {name})")
            weights_module.fetch(name)
        except (OSError, ValueError) as error:
            name = "wide-kv"
            say(f"using the built-in seeded model {name}: {error}")
    return load_model(name, device=device, dtype=dtype, seed=seed)


def default_text() -> str:
    """The English text that ships with kvlab: about 7,000 tokens of SmolLM2."""
    return resources.files("kvlab").joinpath("data", "text.txt").read_text(encoding="utf-8")


_Found = tuple[ModelArch, LazyTensors, str, Callable[[], Tokenizer | ByteTokenizer]]


def _find(source: str | Path | ModelArch, seed: int) -> _Found:
    """Which of the kinds of source this is, and its parts."""
    if isinstance(source, ModelArch):
        return source, weights_module.seeded_tensors(source, seed), f"seeded random weights, seed {seed}", ByteTokenizer
    known = {model.name: model for model in weights_module.known_models()}
    if source in known:
        arch, tensors, said, load_tokenizer = _gguf(
            weights_module.fetch(str(source), quiet=True), known[str(source)].title
        )
        return replace(arch, name=str(source)), tensors, said, load_tokenizer
    if source in preset_names():
        return _find(ModelArch.preset(str(source)), seed)
    path = Path(source)
    if path.is_dir():
        return _folder(path, f"safetensors in {path}")
    if path.suffix == ".gguf":
        return _gguf(path, path.name)
    if isinstance(source, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        return _folder(weights_module.from_hub(source), f"{source} from the hub")
    raise ValueError(
        f"unknown model {str(source)!r}: expected {', '.join(dict.fromkeys((*known, *preset_names())))}, "
        "a folder, a .gguf file, or a hub id 'org/name'"
    )


def _folder(path: Path, said: str) -> _Found:
    arch = ModelArch.from_hf(path)
    return arch, weights_module.read_safetensors(path), said, lambda: tokenizers.from_hf(path)


def _gguf(path: Path, said: str) -> _Found:
    file = GgufFile(path)
    return file.arch(), file.tensors(), f"{said}, dequantised", lambda: tokenizers.from_gguf(file)
