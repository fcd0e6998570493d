"""Formats of weights are refused by the config alone: by name, and with what to take instead."""

import json

import pytest

from dsv4_jax.config import DSV4Config
from helpers.released_configs import DELETE, FLASH, NESTED, edited

FP8 = FLASH["quantization_config"]
# As each tool writes it.
NVFP4 = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["head"]}
REFUSED = {
    "NVIDIA's experts beside FP8": (FP8 | {"moe_quant_algo": "NVFP4"}, "NVFP4"),
    "modelopt": ({"quant_method": "modelopt"} | NVFP4, "NVFP4"),
    "modelopt, FP8 of whole tensors": (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        "quant_algo is 'FP8'",
    ),
    "modelopt, mixed": (
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"layers.0.ffn.experts": NVFP4},
        },
        "NVFP4",
    ),
    "modelopt beside FP8": (
        FP8 | {"quantization": NVFP4, "producer": {"name": "modelopt"}},
        "NVFP4",
    ),
    "another pack of experts": (FP8 | {"moe_quant_algo": "IQ3_WIRE"}, "IQ3_WIRE"),
    "compressed-tensors": (
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        "compressed-tensors",
    ),
    "AWQ": ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq"),
    "GPTQ": ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq"),
    "AutoRound": ({"quant_method": "auto-round", "bits": 4}, "auto-round"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    "bitsandbytes, unnamed": ({"load_in_8bit": True}, "load_in_8bit"),
    "torchao": ({"quant_method": "torchao", "quant_type": {"default": {}}}, "torchao"),
    "MXFP4 in blocks and scales": ({"quant_method": "mxfp4"}, "mxfp4"),
    "MLX": ({"group_size": 64, "bits": 4, "mode": "affine"}, "bits"),
    "FP8 of other blocks": (FP8 | {"weight_block_size": [32, 32]}, "weight_block_size"),
    "FP8 of rows": (FP8 | {"weight_block_size": [1, 128]}, "weight_block_size"),
    "FP8 of whole tensors": (FP8 | {"weight_block_size": None}, "weight_block_size"),
    "FP8 of another kind": (FP8 | {"fmt": "e5m2"}, "e5m2"),
    "activations with stored scales": (FP8 | {"activation_scheme": "static"}, "static"),
    "scales of another kind": (FP8 | {"scale_fmt": "e4m3"}, "scale_fmt"),
    "experts of V4.1's place": (FP8 | {"expert_dtype": "nvfp4"}, "nvfp4"),
    "no object": (["fp8"], "quantization_config must be an object"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("config", [FLASH, NESTED], ids=["released", "transformers"])
def test_another_format_is_refused_by_name(config, name):
    given, word = REFUSED[name]
    with pytest.raises(ValueError, match=r"^config\.json: .*quantization_config") as caught:
        DSV4Config.from_hf(config | {"quantization_config": given})
    assert word in str(caught.value)
    if name != "no object":
        assert "take the model as DeepSeek releases it" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("expert_dtype", "nvfp4"),
        ("expert_dtype", "int4"),
        ("quantization", {"group_size": 64, "bits": 4}),
        ("compression_config", {"format": "pack-quantized"}),
    ],
)
def test_fields_beside_it_name_formats_too(field, value):
    with pytest.raises(ValueError, match=rf"config\.json: {field} is .*not supported; take"):
        DSV4Config.from_hf(FLASH | {field: value})


@pytest.mark.parametrize(
    "given",
    [
        DELETE,
        None,
        {},
        {"quant_method": None},
        FP8,
        FP8 | {"quant_method": "FP8"},
        FP8 | {"fmt": "float8_e4m3fn", "scale_fmt": "float", "modules_to_not_convert": None},
        FP8 | {"expert_dtype": "fp4", "moe_quant_algo": None, "dequantize": False},
        FP8 | {"moe_quant_algo": "MXFP4", "ignore": ["head"]},
        edited(FP8, fmt=DELETE, scale_fmt=DELETE, weight_block_size=DELETE),
        edited(FP8, quant_method=DELETE),
    ],
)
def test_the_release_and_unquantised_weights_are_taken(given):
    assert DSV4Config.from_hf(edited(FLASH, quantization_config=given)) == DSV4Config.flash()


@pytest.mark.parametrize(
    ("beside", "word"),
    [
        ({"producer": {"name": "modelopt"}, "quantization": NVFP4}, "NVFP4"),
        ({"quantization": {"quant_algo": "MIXED_PRECISION"}}, "MIXED_PRECISION"),
        ({"quantization": {"quant_algo": "FP8"}}, "FP8"),  # a scale for a whole tensor
        ({"quantization": [{"layers.0": {"quant_algo": "W4A8_AWQ"}}]}, "W4A8_AWQ"),
        ({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}, None),
    ],
)
def test_modelopts_own_file_is_asked(tmp_path, beside, word):
    (tmp_path / "config.json").write_text(json.dumps(FLASH))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    if word is None:
        assert DSV4Config.from_hf(tmp_path) == DSV4Config.flash()
        return
    with pytest.raises(ValueError, match=rf"hf_quant_config\.json: .*quant_algo is '{word}'"):
        DSV4Config.from_hf(tmp_path)
