"""What a model is, read from its config.json (or from GGUF metadata in the same shape). No torch."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from octavo.errors import InvalidConfig, shown

Config = Mapping[str, Any]

DTYPES = ("float32", "bfloat16", "float16")

MOST_LAYERS = 10_000  # far above any model, and few enough to list what each layer attends to
LARGEST_INTEGER = 2**31 - 1
SMALLEST, LARGEST = 1e-30, 1e30  # of positive numbers: float32 holds them and what is computed of them

# What a family's configuration means where a key is absent; everything else must be written in the file.
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096},
    "mixtral": {"rope_theta": 1e6, "rms_norm_eps": 1e-5},
    "phi3": {"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    "qwen2": {"max_window_layers": 28},
    "qwen3": {"head_dim": 128, "max_window_layers": 28},
    "qwen3_moe": {"norm_topk_prob": False},
    "gemma2": {
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "max_position_embeddings": 131072,
        "vocab_size": 262208,
    },
}
_IGNORES_WINDOW = {"llama"}  # the key may be left over from a conversion; the architecture has no window
_GATED_BY_USE_SLIDING_WINDOW = {"qwen2", "qwen3", "qwen3_moe"}


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """One rotary position embedding: `dim` of a head's dimensions turn, the rest pass.

    `attention_factor` multiplies cos and sin. `frequency_factors` divide the frequencies one by one
    (GGUF's rope_freqs). Formulas: `layers/rotary.py`.
    """

    kind: str
    theta: float
    dim: int
    trained_len: int
    factor: float = 1.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    frequency_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """The mixture-of-experts part: which layers have one, and how a row chooses its experts."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalize: bool
    layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything that models, memory arithmetic and request checks need to know about a checkpoint.

    `dtype` is the checkpoint's until a model is built, then the one it is served in. `max_model_len` is the
    longest sequence served; rotation may depend on it (`layers/rotary.py`), so a shorter one is set with
    `with_max_model_len` before the model is built.
    """

    architecture: str
    dtype: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    max_model_len: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    attention_scale: float
    attention_softcap: float | None
    final_softcap: float | None
    layer_windows: tuple[int | None, ...]
    ropes: tuple[RopeSpec, ...]
    layer_ropes: tuple[int, ...]  # index into `ropes`, by layer
    moe: MoeSpec | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct sliding windows, None for full attention: one attention plan a step for each."""
        return tuple(dict.fromkeys(self.layer_windows))

    def with_max_model_len(self, max_model_len: int) -> Self:
        return dataclasses.replace(self, max_model_len=max_model_len)

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """Read a Hugging Face configuration, of transformers 5 or older.

        Raises:
            InvalidConfig: a key is missing or impossible, or the checkpoint is quantized in a way that
                cannot be read.
        """
        architecture = architecture_of(config)
        _refuse_quantized(config)
        text = _Reader(config, config, architecture).mapping("text_config")
        merged = {**config, **{k: v for k, v in text.items() if v is not None}}
        family = _Reader(merged, merged, architecture).text("model_type") or ""
        given = {key: value for key, value in merged.items() if value is not None}
        read = _Reader({**FAMILY_DEFAULTS.get(family, {}), **given}, merged, architecture)
        if read.flag("use_bidirectional_attention"):
            raise InvalidConfig(f"{architecture}: use_bidirectional_attention=true is an encoder; it cannot generate.")

        hidden, heads = read.positive("hidden_size"), read.positive("num_attention_heads")
        kv_heads = read.positive("num_key_value_heads", heads)
        layers = read.positive("num_hidden_layers", high=MOST_LAYERS)
        head_dim = read.positive("head_dim", max(1, hidden // heads))
        if head_dim % 2:
            raise InvalidConfig(
                f"{architecture}: head_dim={head_dim} (hidden_size={hidden}, num_attention_heads={heads}) "
                "must be an even number from 2."
            )
        if heads % kv_heads:
            raise InvalidConfig(
                f"{architecture}: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}."
            )
        kinds = _layer_kinds(read, family, layers)
        window = read.positive("sliding_window") if "sliding_attention" in kinds else None
        ropes = _ropes(read, family, kinds, head_dim)
        names = list(ropes)
        scalar = read.number("query_pre_attn_scalar", head_dim, low=SMALLEST)
        return cls(
            architecture=architecture,
            dtype=_dtype(read),
            vocab_size=read.positive("vocab_size"),
            hidden_size=hidden,
            intermediate_size=read.positive("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=read.number("rms_norm_eps", 1e-6, low=SMALLEST, high=1.0),
            activation=read.text("hidden_activation") or read.text("hidden_act") or "silu",
            max_model_len=_max_model_len(read, tuple(ropes.values())),
            tie_word_embeddings=read.flag("tie_word_embeddings"),
            attention_bias=read.flag("attention_bias"),
            mlp_bias=read.flag("mlp_bias"),
            attention_scale=scalar**-0.5,
            attention_softcap=read.optional_number("attn_logit_softcapping", low=SMALLEST),
            final_softcap=read.optional_number("final_logit_softcapping", low=SMALLEST),
            layer_windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
            ropes=tuple(ropes.values()),
            layer_ropes=tuple(names.index(kind if kind in ropes else "all") for kind in kinds),
            moe=_moe(read, layers),
            bos_token_id=_first(read.token_ids("bos_token_id")),
            eos_token_ids=read.token_ids("eos_token_id"),
        )


def architecture_of(config: Config) -> str:
    """The first name under `architectures`."""
    names = config.get("architectures")
    if not isinstance(names, Sequence) or isinstance(names, str) or not names:
        raise InvalidConfig(
            "The model's configuration does not name its architecture.",
            'config.json needs a line such as "architectures": ["LlamaForCausalLM"].',
        )
    return str(names[0])


@dataclass(frozen=True, slots=True)
class _Reader:
    """Typed look-ups that name the key at fault. `written` has nulls too, `values` has only what counts."""

    values: Config
    written: Config
    owner: str

    def get(self, key: str) -> Any:
        return None if self.is_null(key) else self.values.get(key)

    def is_null(self, key: str) -> bool:
        """Written as null: that is a choice, and no default replaces it."""
        return key in self.written and self.written[key] is None

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if not isinstance(value, str | None):
            raise self._refuse(key, value, "a string")
        return value

    def mapping(self, key: str) -> Config:
        value = self.get(key)
        if not isinstance(value, Mapping | None):
            raise self._refuse(key, value, "an object of keys and values")
        return value or {}

    def number(self, key: str, default: float | None = None, *, low: float = -LARGEST, high: float = LARGEST) -> float:
        value = self.values.get(key, default)
        if not _is_number(value, low, high):
            raise self._refuse(key, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def optional_number(self, key: str, *, low: float) -> float | None:
        return None if self.get(key) is None else self.number(key, low=low)

    def positive(self, key: str, default: int | None = None, *, low: int = 1, high: int = LARGEST_INTEGER) -> int:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self._refuse(key, value, f"a positive integer, from {low} to {high}")
        return value

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """A list of `count` positive numbers."""
        value = self.values.get(key)
        if not isinstance(value, list | tuple) or len(value) != count:
            raise self._refuse(key, value, f"a list of {count} numbers")
        for i, number in enumerate(value):
            if not _is_number(number, SMALLEST, LARGEST):
                raise InvalidConfig(
                    f"{self.owner}: {key}[{i}]={shown(number)} in the configuration must be a number "
                    f"from {SMALLEST:g} to {LARGEST:g}."
                )
        return tuple(float(number) for number in value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self._refuse(key, value, "true or false")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self.get(key)
        ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= LARGEST_INTEGER for i in ids):
            raise self._refuse(key, value, f"a token id from 0 to {LARGEST_INTEGER}, or a list of them")
        return tuple(ids)

    def _refuse(self, key: str, value: object, allowed: str) -> InvalidConfig:
        if key not in self.values:
            return InvalidConfig(f"{self.owner}: the configuration has no {key}; it must be {allowed}.")
        return InvalidConfig(f"{self.owner}: {key}={shown(value)} in the configuration must be {allowed}.")


def _is_number(value: object, low: float, high: float) -> bool:
    """An integer or float in the range; a NaN is in none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _first(ids: tuple[int, ...]) -> int | None:
    return ids[0] if ids else None


def _refuse_quantized(config: Config) -> None:
    text = config.get("text_config")
    for owner in (config, text if isinstance(text, Mapping) else {}):
        for key in ("quantization_config", "compression_config"):
            found = owner.get(key)
            if found:
                name = (found.get("quant_method") if isinstance(found, Mapping) else None) or "an unnamed method"
                raise InvalidConfig(
                    f"The checkpoint is quantized with {name}, which Octavo cannot read.",
                    "Use the unquantized checkpoint or a GGUF file of the model.",
                )


def _dtype(read: _Reader) -> str:
    name = (read.text("dtype") or read.text("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise InvalidConfig(f"{read.owner}: dtype {shown(name)} is not one of {', '.join(DTYPES)}.")
    return name


def _layer_kinds(read: _Reader, family: str, layers: int) -> list[str]:
    """Name what each layer attends to: "full_attention" or "sliding_attention"."""
    off = family in _GATED_BY_USE_SLIDING_WINDOW and not read.flag("use_sliding_window")
    if family in _IGNORES_WINDOW or off or read.get("sliding_window") is None:
        return ["full_attention"] * layers
    kinds = read.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list | tuple) or not all(isinstance(kind, str) for kind in kinds):
            raise InvalidConfig(f"{read.owner}: layer_types={shown(kinds)} must be a list of strings, one a layer.")
        unknown = set(kinds) - {"full_attention", "sliding_attention"}
        if len(kinds) != layers or unknown:
            what = f"the kinds {shown(sorted(unknown))}" if unknown else f"{len(kinds)} entries for {layers} layers"
            raise InvalidConfig(f"{read.owner}: layer_types has {what}.")
        return list(kinds)
    if read.get("sliding_window_pattern"):
        pattern = read.positive("sliding_window_pattern")
        return ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]
    first = read.positive("max_window_layers", 0, low=0) if family in ("qwen2", "qwen3") else 0
    return ["full_attention" if i < first else "sliding_attention" for i in range(layers)]


def _ropes(read: _Reader, family: str, kinds: list[str], head_dim: int) -> dict[str, RopeSpec]:
    """Rotary embeddings by kind of layer, or one under "all"."""
    parameters, scaling = read.mapping("rope_parameters"), read.mapping("rope_scaling")
    nested = {key: value for key, value in parameters.items() if isinstance(value, Mapping)}
    if not nested and family == "gemma3_text":
        nested = {
            "full_attention": {**parameters, **scaling},
            "sliding_attention": {"rope_theta": read.number("rope_local_base_freq", low=SMALLEST)},
        }
    if nested:
        return {kind: _rope(read, family, nested.get(kind, {}), head_dim) for kind in dict.fromkeys(kinds)}
    return {"all": _rope(read, family, {**parameters, **scaling}, head_dim)}


def _rope(read: _Reader, family: str, given: Config, head_dim: int) -> RopeSpec:
    """One rotary embedding; defaults of factors as in the papers' code and transformers' rope utilities."""
    values = _Reader({k: v for k, v in given.items() if v is not None}, given, f"{read.owner}: rope parameters")
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind == "su" or (kind == "yarn" and family == "phi3"):
        kind = "longrope"  # its names in older Phi-3 files
    max_len = read.positive("max_position_embeddings")
    trained_len = max_len
    if kind in ("llama3", "yarn", "longrope"):
        key = "original_max_position_embeddings"
        trained_len = (read if key in read.values else values).positive(key, max_len, low=2)
    partial = read.number("partial_rotary_factor", 1.0, low=SMALLEST, high=1.0)
    partial = values.number("partial_rotary_factor", partial, low=SMALLEST, high=1.0)
    dim = int(head_dim * partial)
    dim += dim % 2 if dim < head_dim else 0
    theta = values.number("rope_theta", read.number("rope_theta", 10000.0, low=SMALLEST), low=SMALLEST)
    if theta <= 1:
        raise InvalidConfig(f"{values.owner}: rope_theta={theta} must be above 1.")
    if dim == 0 or (dim == 2 and kind == "dynamic"):
        raise InvalidConfig(
            f"{values.owner}: partial_rotary_factor={partial} turns {dim} of {head_dim} dimensions; "
            f"it must turn at least {4 if kind == 'dynamic' else 2}."
        )
    turned = values.numbers("frequency_factors", dim // 2) if "frequency_factors" in values.values else ()
    spec = RopeSpec(kind, theta, dim, trained_len, frequency_factors=turned)
    if kind == "default":
        return spec
    if kind in ("linear", "dynamic"):
        return dataclasses.replace(spec, factor=values.number("factor", low=SMALLEST))
    if kind == "llama3":
        low = values.number("low_freq_factor", low=SMALLEST)
        high = values.number("high_freq_factor", low=SMALLEST)
        if high <= low:
            raise InvalidConfig(f"{values.owner}: high_freq_factor={high} must be above low_freq_factor={low}.")
        factor = values.number("factor", low=SMALLEST)
        return dataclasses.replace(spec, factor=factor, low_freq_factor=low, high_freq_factor=high)
    factor = values.number("factor", max_len / trained_len, low=SMALLEST)
    if kind == "yarn":
        return dataclasses.replace(
            spec,
            factor=factor,
            attention_factor=_yarn_attention_factor(values, factor),
            beta_fast=values.number("beta_fast", 32.0, low=SMALLEST),
            beta_slow=values.number("beta_slow", 1.0, low=SMALLEST),
            truncate=values.flag("truncate", True),
        )
    if kind == "longrope":
        default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained_len))
        return dataclasses.replace(
            spec,
            factor=factor,
            attention_factor=values.number("attention_factor", default, low=SMALLEST),
            short_factors=values.numbers("short_factor", dim // 2),
            long_factors=values.numbers("long_factor", dim // 2),
        )
    raise InvalidConfig(
        f"{read.owner}: rope type {shown(kind)} is not one of default, linear, dynamic, llama3, yarn, longrope."
    )


def _yarn_attention_factor(values: _Reader, factor: float) -> float:
    """0.1 m ln(s) + 1 (YaRN, section 3.4), or the quotient of two of them as DeepSeek's files ask."""

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, all_dim = values.optional_number("mscale", low=0), values.optional_number("mscale_all_dim", low=0)
    default = scale(mscale) / scale(all_dim) if mscale and all_dim else scale(1.0)
    return values.number("attention_factor", default, low=SMALLEST)


def _max_model_len(read: _Reader, ropes: tuple[RopeSpec, ...]) -> int:
    """The longest sequence the checkpoint is meant for.

    Linear and dynamic scaling stretch `max_position_embeddings` by their factor, YaRN stretches
    `original_max_position_embeddings`; with llama3, longrope and one rope per kind of layer,
    `max_position_embeddings` is the stretched length already.
    """
    length = read.positive("max_position_embeddings")
    if len(ropes) == 1 and ropes[0].kind in ("linear", "dynamic", "yarn"):
        trained, factor = ropes[0].trained_len, ropes[0].factor
        length = int(trained * factor)
        if not 1 <= length <= LARGEST_INTEGER:
            raise InvalidConfig(
                f"{read.owner}: rope factor={factor} stretches {trained} positions to {length}; "
                f"it must give 1 to {LARGEST_INTEGER}."
            )
    return length


def _moe(read: _Reader, layers: int) -> MoeSpec | None:
    if read.get("num_experts") is None and read.get("num_local_experts") is None:
        return None
    key = "num_experts" if read.get("num_experts") is not None else "num_local_experts"
    experts, chosen = read.positive(key), read.positive("num_experts_per_tok")
    if chosen > experts:
        raise InvalidConfig(f"{read.owner}: num_experts_per_tok={chosen} is above {key}={experts}.")
    step, listed = read.positive("decoder_sparse_step", 1), read.get("mlp_only_layers") or []
    if not isinstance(listed, list | tuple) or not all(_is_number(i, 0, layers) for i in listed):
        raise InvalidConfig(f"{read.owner}: mlp_only_layers={shown(listed)} must be a list of layer numbers.")
    dense = set(listed)
    return MoeSpec(
        num_experts=experts,
        experts_per_token=chosen,
        intermediate_size=read.positive("moe_intermediate_size", read.positive("intermediate_size")),
        normalize=read.flag("norm_topk_prob", True),
        layers=frozenset(i for i in range(layers) if i not in dense and (i + 1) % step == 0),
    )
