"""Formats of weights, as `config.json` names them: those that are read, and a refusal of others.

What a tool writes about quantised weights says more than can be checked in files without
downloading them. So it is judged by itself, and a file that holds something else is found later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dsv4_jax.config.kinds import show

HF_QUANT_CONFIG = "hf_quant_config.json"
"""What NVIDIA's modelopt writes beside `config.json`."""

_FP8_FIELDS: dict[str, tuple[Any, ...]] = {
    "fmt": ("e4m3", "e4m3fn", "float8_e4m3fn"),
    "activation_scheme": ("dynamic",),
    "scale_fmt": ("ue8m0", "float", "float32", "fp32"),
}
"""Values of fields beside `quant_method: fp8`; all of them may be absent or null."""

_EXPERTS = ("fp4", "mxfp4", "fp8", "bf16", "bfloat16", "fp16", "float16", "fp32", "float32")
_ALGORITHMS = ("", "mxfp4", "fp8_block_scales")
"""Of modelopt, to which FP8 alone is one scale for a whole tensor."""

_TAKE = (
    "take the model as DeepSeek releases it, in FP8 of blocks of 128 x 128 (V4.1: 32 x 32) and "
    "MXFP4, or one stored in BF16"
)


def check_formats(contents: dict[str, Any], *, block: int = 128) -> None:
    """Refuses a config whose weights are stored in a format that is not read.

    Args:
      contents: of `config.json`.
      block: outputs and inputs that share a scale of FP8 in that model.

    Raises:
      ValueError: it names such a format; the message names it, and what to take instead.
    """
    _check_word("expert_dtype", contents.get("expert_dtype"), _EXPERTS)
    for name in ("quantization", "compression_config"):  # of MLX, and of compressed-tensors once
        if contents.get(name):
            _refuse(name, contents[name])
    given = contents.get("quantization_config")
    if not isinstance(given, dict | None):
        raise ValueError(f"quantization_config must be an object of fields, got {show(given)}")
    fields = {name: value for name, value in (given or {}).items() if value is not None}
    if not fields:
        return
    check_algorithms(fields, "quantization_config")
    method = fields.get("quant_method")
    if not isinstance(method, str) or method.lower() != "fp8":
        if method is None and fields.keys() <= {*_FP8_FIELDS, "weight_block_size"}:
            method = "fp8"
        else:
            _refuse("quantization_config" + (".quant_method" if method else ""), method or fields)
    for name, allowed in _FP8_FIELDS.items():
        _check_word(f"quantization_config.{name}", fields.get(name), allowed)
    _check_word("quantization_config.expert_dtype", fields.get("expert_dtype"), _EXPERTS)
    wanted = [block, block]
    size = (given or {}).get("weight_block_size", wanted)
    if size is None or list(size if isinstance(size, list | tuple) else [size]) != wanted:
        _refuse("quantization_config.weight_block_size", size)


def check_algorithms(fields: Any, path: str) -> None:
    """Refuses algorithms of modelopt, however deep they are named.

    Args:
      fields: an object of `config.json`, or all of `HF_QUANT_CONFIG`.
      path: its name, or the empty text.

    Raises:
      ValueError: one is not read.
    """
    found = list(_algorithms(fields, path))
    for name, value in sorted(found, key=lambda each: str(each[1]).lower() == "mixed_precision"):
        _check_word(name, value, _ALGORITHMS)


def _algorithms(fields: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(fields, list):
        fields = {str(number): value for number, value in enumerate(fields)}
    if not isinstance(fields, dict):
        return
    for name, value in fields.items():
        if name in ("quant_algo", "moe_quant_algo") and value is not None:
            yield _join(path, name), value
        else:
            yield from _algorithms(value, _join(path, name))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _check_word(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value is not None and (not isinstance(value, str) or value.lower() not in allowed):
        _refuse(name, value)


def _refuse(name: str, value: Any) -> None:
    raise ValueError(f"{name} is {show(value)}, a format of weights that is not supported; {_TAKE}")
