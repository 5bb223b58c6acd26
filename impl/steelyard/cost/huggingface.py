"""Hugging Face configurations, given or shipped, as the fields of a ModelShape.

The keys and their defaults are those of the configuration classes of transformers; the shipped ones in
``data/model_presets.json`` are the sizes in each model's public ``config.json``, named there.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib import resources
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from steelyard.errors import ShapeError
from steelyard.hints import did_you_mean

_KNOWN = ("qwen2", "qwen3", "llama", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3")


def shape_fields(config: Any, name: str | None) -> dict[str, Any]:
    """The keyword arguments of a ModelShape for ``config`` (see ``ModelShape.from_hf``)."""
    values, where = _load(config)
    kind = values.get("model_type")
    name = name or values.get("_name_or_path") or where or kind or "config"
    if kind not in _KNOWN:
        if isinstance(values.get("text_config"), Mapping):
            raise ShapeError(f"model {name}: holds several models: pass the part for text, config['text_config']")
        raise ShapeError(
            f"model {name}: model_type={kind!r} is unknown{did_you_mean(str(kind), _KNOWN)}: the known ones are "
            f"{', '.join(_KNOWN)}; for another one fill in a ModelShape"
        )
    read = _Reader(values, name)
    _refuse_what_a_shape_lacks(read, kind)
    latent = kind.startswith("deepseek")
    fields = {
        "name": name,
        "layers": read.size("num_hidden_layers"),
        "hidden": read.size("hidden_size"),
        "ffn": read.size("intermediate_size"),
        "vocab": read.size("vocab_size"),
        "tied": read.flag("tie_word_embeddings"),
        "qk_norm": kind.startswith("qwen3"),
        "norm_eps": read.number("rms_norm_eps", 1e-6),
        "rope_theta": read.rope_theta(),
        "max_positions": read.size("max_position_embeddings", 32768),
    }
    return fields | (_latent(read) if latent else _attention(read, kind)) | _experts(read, kind)


class _Reader:
    """Takes values out of a configuration and says which one is wrong."""

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self.values, self.name = values, name

    def size(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise ShapeError(f"model {self.name}: the configuration has no {key!r}: add it (a whole number)")
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ShapeError(f"model {self.name}: {key}={value!r} must be a whole number of at least {least}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise ShapeError(f"model {self.name}: {key}={value!r} must be a number above 0")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise ShapeError(f"model {self.name}: {key}={value!r} must be true or false")
        return default if value is None else value

    def rope_theta(self) -> float:
        # transformers 5 moved it into a table of its own.
        table = self.values.get("rope_parameters")
        nested = table if isinstance(table, Mapping) and table.get("rope_theta") is not None else self.values
        return _Reader(nested, self.name).number("rope_theta", 1e4)


def _refuse_what_a_shape_lacks(read: _Reader, kind: str) -> None:
    values = read.values
    refused: list[str] = []
    if values.get("hidden_act", "silu") not in ("silu", "swish"):
        refused.append("hidden_act")
    refused += [key for key in ("use_sliding_window", "mlp_bias") if read.flag(key)]
    if kind.startswith("deepseek") and read.flag("attention_bias"):
        refused.append("attention_bias")
    refused += [key for key in ("decoder_sparse_step", "moe_layer_freq") if values.get(key, 1) != 1]
    if refused:
        what = ", ".join(f"{key}={values[key]!r}" for key in refused)
        raise ShapeError(f"model {read.name}: {what} is not something a {kind} ModelShape describes")


def _attention(read: _Reader, kind: str) -> dict[str, Any]:
    heads, hidden = read.size("num_attention_heads"), read.size("hidden_size")
    if read.values.get("head_dim") is None and hidden % heads:
        raise ShapeError(f"model {read.name}: hidden_size={hidden} is not a multiple of num_attention_heads={heads}")
    bias = read.flag("attention_bias")
    return {
        "heads": heads,
        "kv_heads": read.size("num_key_value_heads", heads),
        "head_dim": read.size("head_dim", hidden // heads),
        # Qwen2 has these biases whatever its configuration says; elsewhere the flag means the output projection too.
        "qkv_bias": read.flag("qkv_bias", True) if kind.startswith("qwen2") else bias,
        "out_bias": bias and not kind.startswith("qwen2"),
    }


def _latent(read: _Reader) -> dict[str, Any]:
    nope, rope = read.size("qk_nope_head_dim"), read.size("qk_rope_head_dim")
    heads = read.size("num_attention_heads")
    return {
        "heads": heads,
        # Every head has keys and values of its own, made from the latent. The configuration's own head_dim, where there
        # is one, is only the rotary part.
        "kv_heads": heads,
        "head_dim": nope + rope,
        "q_lora": read.size("q_lora_rank", 0, least=0),
        "kv_lora": read.size("kv_lora_rank"),
        "qk_nope": nope,
        "qk_rope": rope,
        "v_head_dim": read.size("v_head_dim"),
    }


def _experts(read: _Reader, kind: str) -> dict[str, Any]:
    deepseek = kind.startswith("deepseek")
    if not deepseek and not kind.endswith("moe"):
        return {}
    # transformers 5 writes num_local_experts for every family.
    keys = ("num_experts", "n_routed_experts", "num_local_experts")
    key = next((each for each in keys if read.values.get(each) is not None), None)
    if key is None and deepseek:
        return {}  # a DeepSeek configuration without routed experts is a dense model
    fields: dict[str, Any] = {
        "experts": read.size(key or "num_experts"),
        "experts_per_token": read.size("num_experts_per_tok"),
        "moe_ffn": read.size("moe_intermediate_size"),
        "norm_topk_prob": read.flag("norm_topk_prob", kind == "deepseek_v3"),
    }
    if kind == "qwen2_moe":
        return fields | {
            "shared_ffn": read.size("shared_expert_intermediate_size"),
            "shared_gate": True,
            "dense_layers": _leading_dense(read),
        }
    if kind == "qwen3_moe":
        return fields | {"dense_layers": _leading_dense(read)}
    return fields | {
        "shared_ffn": read.size("n_shared_experts", 0, least=0) * fields["moe_ffn"],
        "dense_layers": read.size("first_k_dense_replace", 0, least=0),
    }


def _leading_dense(read: _Reader) -> int:
    """How many leading layers are dense, by Qwen's list of dense layers."""
    dense = read.values.get("mlp_only_layers") or []
    if dense != list(range(len(dense))):
        raise ShapeError(f"model {read.name}: mlp_only_layers={dense!r} must be the leading layers 0, 1 …")
    return len(dense)


def _load(config: Any) -> tuple[Mapping[str, Any], str]:
    """The configuration as a mapping, and a name for where it came from."""
    if isinstance(config, Mapping):
        return config, ""
    if not isinstance(config, str | PathLike):
        if callable(getattr(config, "to_dict", None)):
            return config.to_dict(), ""
        raise ShapeError(f"a {type(config).__name__} is no configuration: give a dict, a path or a transformers config")
    path = Path(fspath(config))
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        hint = f"; for a shipped shape use ModelShape.preset({path.name!r})" if path.name in preset_names() else ""
        raise ShapeError(f"{file}: cannot be read ({error.strerror or error}): check the path{hint}") from None
    except (ValueError, RecursionError) as error:
        raise ShapeError(f"{file}: is not valid JSON ({error}): give a model's config.json") from None
    if not isinstance(values, dict):
        raise ShapeError(f"{file}: holds a {type(values).__name__}: give a model's config.json, which is an object")
    return values, path.name if path.is_dir() else file.parent.name or path.name


@functools.cache
def _presets() -> dict[str, Any]:
    text = (resources.files("steelyard") / "data" / "model_presets.json").read_text(encoding="utf-8")
    shipped: dict[str, Any] = json.loads(text)
    return shipped


def preset_names() -> list[str]:
    """Names of the shipped configurations, in the order of their file."""
    return list(_presets())


def preset_config(name: str) -> tuple[str, dict[str, Any]]:
    """Canonical name and configuration of a preset, looked up by its name or by one of its other names."""
    by_name = {each: key for key, entry in _presets().items() for each in (key, *entry.get("also", []))}
    canonical = by_name.get(str(name).casefold())
    if canonical is None:
        raise ShapeError(
            f"unknown model preset {name!r}{did_you_mean(str(name), by_name)}: choose one of {', '.join(_presets())}, "
            f"or pass a config.json to ModelShape.from_hf"
        )
    return canonical, _presets()[canonical]["config"]
