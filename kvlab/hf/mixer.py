"""What one layer's mixer caches and costs: GQA, MLA (with or without an indexer), compressed attention, recurrences.

Knows the shapes of the mixers (from transformers 5.24, models/<type>/modeling_<type>.py) and reads their sizes from a
config. Does not know which layer holds which mixer (`hf.layers`) nor the FFN (`hf.ffn`).

State updates count matrix products only: 2 MACs per state element for Mamba and lightning attention (write, read), 3
for the delta rule (recall, write, read), plus kernel × channels for a depthwise convolution. Decays, gates and the
extra work of chunk-wise kernels are left out.
"""

from __future__ import annotations

from kvlab.hf.fields import Fields
from kvlab.hf.rules import GATED_QUERY, OUTPUT_GATE
from kvlab.layers import CacheComponent, Layer, Pairs

__all__ = ["attention", "compressed", "model_dtype", "short_conv", "state"]

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32", "float64": "fp64"}


def model_dtype(f: Fields, name: str = "dtype") -> str | None:
    """A dtype field in kvlab's words, or None. Raises ValueError for a word it does not know."""
    key, value = f.find(name)
    if value is None or value == "auto":
        return None
    word = str(value).removeprefix("torch.")
    if word not in DTYPES:
        raise ValueError(f"config field {key!r} is {value!r}; expected one of {', '.join(DTYPES)}")
    return DTYPES[word]


def attention(f: Fields, kind: str, layer: int, *, shares_kv: bool = False, has_indexer: bool = True) -> Layer:
    """Softmax attention: full, in a sliding window, or in aligned chunks. `shares_kv` reuses another layer's cache."""
    window = f.size("sliding_window") if kind == "sliding" else None
    chunk = f.size("attention_chunk_size") if kind == "chunked" else None
    if f.raw("kv_lora_rank") is not None:
        return _latent(f, kind, window, has_indexer)
    if f.raw("index_topk") is not None:
        raise ValueError(
            f"config has index_topk {f['index_topk']!r} but no kv_lora_rank; kvlab knows indexers of MLA layers only"
        )
    heads, kv_heads = f.size("num_attention_heads", layer=layer), _kv_heads(f, layer)
    head_dim = _head_dim(f, heads)
    value_dim = f.size("v_head_dim", head_dim)
    hidden, key, value = f.size("hidden_size"), kv_heads * head_dim, kv_heads * value_dim
    query_in = f.size("attention_hidden_size", hidden)
    macs = query_in * heads * head_dim + heads * value_dim * hidden
    if f.flag("attn_output_gate", f.model_type in GATED_QUERY):
        macs += query_in * heads * head_dim
    macs += {"elements": hidden * heads * head_dim, "heads": hidden * heads}.get(OUTPUT_GATE.get(f.model_type, ""), 0)
    cache: tuple[CacheComponent, ...] = ()
    if not shares_kv:
        # Gemma 4 normalises one projection in two ways: v has no matrix of its own, yet both k and v are cached.
        tied_value = f.flag("attention_k_eq_v") and kind == "full"
        macs += query_in * (key + (0 if tied_value else value))
        cap, chunked = window or chunk, chunk is not None
        cache = (
            CacheComponent("k", key, heads=kv_heads, cap_tokens=cap, chunked=chunked),
            CacheComponent("v", value, heads=kv_heads, cap_tokens=cap, chunked=chunked),
        )
    return Layer(
        kind=kind,
        cache=cache,
        projection_macs=macs,
        pairs=(Pairs(heads * (head_dim + value_dim), limit=window, chunk=chunk),),
    )


def _kv_heads(f: Fields, layer: int) -> int:
    heads = f.size("num_attention_heads", layer=layer)
    nested = f.section("attn_config")  # MPT, DBRX
    if nested.get("attn_type") == "multiquery_attention":
        return 1
    if nested.get("kv_n_heads") is not None:
        kv_heads = f.having(nested).size("kv_n_heads")
    elif "new_decoder_architecture" in f or "multi_query" in f or f.raw("multi_query") is not None:
        # Falcon (modeling_falcon.py, FalconAttention) and GPT-BigCode: with multi_query num_kv_heads counts only in
        # Falcon's new architecture.
        grouped = f.flag("new_decoder_architecture")
        multi_query = f.flag("multi_query", f.model_type == "falcon")
        kv_heads = f.size("num_key_value_heads", heads) if grouped else 1 if multi_query else heads
    elif f.raw("multi_query_attention") is not None and not f.flag("multi_query_attention"):
        kv_heads = heads  # ChatGLM: multi_query_group_num counts only when multi_query_attention is on
    else:
        kv_heads = f.size("num_key_value_heads", heads, layer=layer)
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is not a multiple of the number of KV heads {kv_heads}")
    return kv_heads


def _head_dim(f: Fields, heads: int) -> int:
    head_dim = f.optional_size("head_dim")
    if head_dim is not None:
        return head_dim
    hidden = f.size("hidden_size")
    if hidden % heads:
        raise ValueError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}; add head_dim")
    return hidden // heads


def _latent(f: Fields, kind: str, window: int | None, has_indexer: bool) -> Layer:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): one latent and one RoPE key a token."""
    hidden, heads = f.size("hidden_size"), f.size("num_attention_heads")
    rank, nope, rope, value = (
        f.size(name) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    query_rank = f.optional_size("q_lora_rank")
    query = heads * (nope + rope)
    expand = rank * heads * (nope + value)
    macs = hidden * query if query_rank is None else hidden * query_rank + query_rank * query
    macs += hidden * (rank + rope) + expand + heads * value * hidden
    macs += hidden * heads * value if OUTPUT_GATE.get(f.model_type) == "values" else 0
    cache = [
        CacheComponent("latent", rank, cap_tokens=window),
        CacheComponent("rope_key", rope, cap_tokens=window),
    ]
    limit, scoring = window, []
    if f.raw("index_topk") is not None and kind == "full":
        limit = f.size("index_topk")
        if has_indexer:
            # DeepSeek-V3.2's lightning indexer: heads score every key, the top k are attended to.
            index_heads, index_dim = f.size("index_n_heads"), f.size("index_head_dim")
            cache.append(CacheComponent("index_key", index_dim))
            macs += (query_rank or hidden) * index_heads * index_dim + hidden * (index_dim + index_heads)
            scoring = [Pairs(index_heads * (index_dim + 1))]
    # Absorbed (weights of kv_b folded into query and output): the same weight MACs per token, wider pairs, and no
    # key is ever expanded. Expanded: narrow pairs, but each cached latent is projected again in each pass.
    absorbed = Layer(kind, tuple(cache), macs, pairs=(Pairs(heads * (2 * rank + rope), limit), *scoring))
    return Layer(
        kind,
        tuple(cache),
        macs,
        pairs=(Pairs(heads * (nope + rope + value), limit), *scoring),
        cached_key_macs=expand,
        absorbed=absorbed,
    )


def compressed(f: Fields, kind: str, ratio: int) -> Layer:
    """DeepSeek-V4 attention: a window of raw keys beside a cache with one entry per `ratio` tokens, one KV head.

    The key is the value. `compressed_sparse` overlaps its groups (twice as wide projections) and picks entries with
    an indexer over its own compressed keys. The raw inputs of a group that is not full yet are left out.
    """
    hidden, heads, head_dim = (f.size(name) for name in ("hidden_size", "num_attention_heads", "head_dim"))
    query_rank, window = f.size("q_lora_rank"), f.size("sliding_window")
    macs = hidden * query_rank + query_rank * heads * head_dim + hidden * head_dim
    # Output in groups: (heads × head_dim) -> o_lora_rank within each of o_groups, then to hidden.
    macs += heads * head_dim * f.size("o_lora_rank") + f.size("o_groups") * f.size("o_lora_rank") * hidden
    cache = [CacheComponent("window", head_dim, cap_tokens=window)]
    pairs = [Pairs(2 * heads * head_dim, limit=window)]
    if kind != "sliding":
        overlap = 2 if kind == "compressed_sparse" else 1
        macs += 2 * hidden * overlap * head_dim
        cache.append(CacheComponent("compressed", head_dim, tokens_per_entry=ratio))
        topk = None
        if kind == "compressed_sparse":
            index_heads, index_dim, topk = f.size("index_n_heads"), f.size("index_head_dim"), f.size("index_topk")
            macs += 2 * hidden * overlap * index_dim + query_rank * index_heads * index_dim + hidden * index_heads
            cache.append(CacheComponent("index_key", index_dim, tokens_per_entry=ratio))
            pairs.append(Pairs(index_heads * (index_dim + 1), tokens_per_key=ratio))
        pairs.append(Pairs(2 * heads * head_dim, limit=topk, tokens_per_key=ratio))
    return Layer(kind, tuple(cache), macs, pairs=tuple(pairs))


def state(f: Fields) -> Layer:
    """The recurrent mixer that the config describes. Raises ValueError if it describes none that kvlab knows."""
    if f.raw("linear_num_value_heads") is not None:
        return _delta_net(f)
    if f.raw("linear_attn_config") is not None or f.raw("linear_num_heads") is not None:
        return _kimi_delta(f)
    if f.model_type.startswith("minimax") or "attn_type_list" in f:
        return _lightning(f)
    if f.raw("lru_width") is not None or f.model_type == "recurrent_gemma":
        return _rg_lru(f)
    if f.raw("mamba_state") is not None:
        heads_in_config = f.raw("mamba_heads") is not None and f.raw("mamba_head_dim") is not None
        return _mamba2(f) if heads_in_config or f.model_type in ("mamba2", "zamba2") else _mamba1(f)
    raise ValueError(
        f"model_type {f.model_type!r} has recurrent layers of a kind kvlab cannot size: no linear_num_value_heads, "
        "linear_attn_config, lru_width or mamba_d_state/ssm_state_size; add them, or the model is not one kvlab reads"
    )


def _recurrent(macs: int, conv: list[CacheComponent], memory: CacheComponent, scan: int) -> Layer:
    return Layer("state", (*conv, memory), projection_macs=macs, scan_macs=scan)


def _conv(f: Fields, name: str, channels: int, heads: int, kernel: int) -> CacheComponent:
    # kernel - 1 past inputs decide the next output (vLLM mamba_utils.py); transformers keeps all `kernel` columns.
    return CacheComponent(name, fixed_elements=(kernel - 1) * channels, heads=heads, dtype=model_dtype(f) or "bf16")


def _memory(f: Fields, elements: int, heads: int) -> CacheComponent:
    dtype = model_dtype(f, "state_dtype") or model_dtype(f) or "bf16"
    return CacheComponent("state", fixed_elements=elements, heads=heads, dtype=dtype)


def _delta_net(f: Fields) -> Layer:
    """Gated delta rule (Qwen3-Next, arXiv 2412.06464)."""
    hidden, kernel = f.size("hidden_size"), f.size("linear_conv_kernel_dim", 4)
    key_heads, value_heads = f.size("linear_num_key_heads"), f.size("linear_num_value_heads")
    key = key_heads * f.size("linear_key_head_dim")
    value = value_heads * f.size("linear_value_head_dim")
    memory = value_heads * f.size("linear_key_head_dim") * f.size("linear_value_head_dim")
    macs = hidden * (2 * key + 2 * value + 2 * value_heads) + value * hidden
    conv = [_conv(f, "conv_qk", 2 * key, key_heads, kernel), _conv(f, "conv_v", value, value_heads, kernel)]
    return _recurrent(macs, conv, _memory(f, memory, value_heads), 3 * memory + kernel * (2 * key + value))


def _kimi_delta(f: Fields) -> Layer:
    """Kimi delta attention (Kimi-Linear, arXiv 2510.26692): channel-wise gates through a low rank of one head."""
    own = f.having(f.section("linear_attn_config"))
    hidden, nested = f.size("hidden_size"), "linear_attn_config" in f
    heads = own.size("num_heads" if nested else "linear_num_heads")
    head_dim = own.size("head_dim" if nested else "linear_head_dim")
    kernel = own.size("short_conv_kernel_size" if nested else "linear_conv_kernel_dim", 4)
    width = heads * head_dim
    macs = 4 * hidden * width + 2 * (hidden * head_dim + head_dim * width) + hidden * heads
    conv = [_conv(f, "conv_qkv", 3 * width, heads, kernel)]
    return _recurrent(macs, conv, _memory(f, width * head_dim, heads), 3 * width * head_dim + kernel * 3 * width)


def _lightning(f: Fields) -> Layer:
    """Lightning attention (MiniMax-01, arXiv 2501.08313): q, k, v and an output gate, no convolution."""
    hidden, heads = f.size("hidden_size"), f.size("num_attention_heads")
    width = heads * _head_dim(f, heads)
    memory = width * _head_dim(f, heads)
    return _recurrent(5 * hidden * width, [], _memory(f, memory, heads), 2 * memory)


def _rg_lru(f: Fields) -> Layer:
    """RG-LRU (Griffin, arXiv 2402.19427): its state is kept in fp32."""
    hidden, kernel, heads = f.size("hidden_size"), f.size("conv1d_width", 4), f.size("num_attention_heads")
    width = f.size("lru_width", hidden)
    macs = 3 * hidden * width + 2 * width * (width // heads)
    memory = CacheComponent("state", fixed_elements=width, heads=heads, dtype="fp32")
    return _recurrent(macs, [_conv(f, "conv", width, heads, kernel)], memory, kernel * width)


def _mamba2(f: Fields) -> Layer:
    """Mamba-2 (arXiv 2405.21060): heads with one decay each, B and C shared by the heads of a group."""
    hidden, size, groups = f.size("hidden_size"), f.size("mamba_state"), f.size("mamba_groups", 1)
    kernel = f.size("mamba_conv", 4)
    heads = f.size("num_attention_heads" if f.model_type == "mamba2" else "mamba_heads")
    inner = f.optional_size("mamba_d_ssm")
    if inner is None:
        width = f.raw("head_dim" if f.model_type == "mamba2" else "mamba_head_dim")
        given = width not in (None, "auto")
        inner = heads * f.size("head_dim" if f.model_type == "mamba2" else "mamba_head_dim") if given else 0
        inner = inner or int(f.number("mamba_expand", 2) * hidden)
    if inner % heads:
        raise ValueError(f"Mamba width {inner} is not a multiple of its {heads} heads; add mamba_head_dim")
    shared = 2 * groups * size
    macs = hidden * (2 * inner + shared + heads) + inner * hidden
    conv = [_conv(f, "conv_x", inner, heads, kernel), _conv(f, "conv_bc", shared, groups, kernel)]
    return _recurrent(macs, conv, _memory(f, inner * size, heads), 2 * inner * size + kernel * (inner + shared))


def _mamba1(f: Fields) -> Layer:
    """Mamba (arXiv 2312.00752): one channel, one decay; dt through a low rank of ceil(hidden / 16) by default."""
    hidden, size, kernel = f.size("hidden_size"), f.size("mamba_state"), f.size("mamba_conv", 4)
    rank = -(-hidden // 16) if f.raw("mamba_dt_rank") in (None, "auto") else f.size("mamba_dt_rank")
    inner = int(f.number("mamba_expand", 2) * hidden)
    if f.model_type in ("mamba", "falcon_mamba"):
        inner = f.size("intermediate_size", inner)  # these state their inner width themselves
    macs = 2 * hidden * inner + inner * (rank + 2 * size) + rank * inner + inner * hidden
    conv = [_conv(f, "conv_x", inner, inner, kernel)]
    return _recurrent(macs, conv, _memory(f, inner * size, inner), 2 * inner * size + kernel * inner)


def short_conv(f: Fields) -> Layer:
    """The gated short convolution of LFM2 (modeling_lfm2.py, Lfm2ShortConv)."""
    hidden, kernel = f.size("hidden_size"), f.size("conv_L_cache")
    return Layer(
        "conv",
        (_conv(f, "conv", hidden, hidden, kernel),),
        projection_macs=4 * hidden * hidden,
        scan_macs=kernel * hidden,
    )
