"""The model with weights in the formats of the release, against the same with decoded weights."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dsv4_jax as ds
from dsv4_jax.attention.params import attention_shapes, f32_shape
from dsv4_jax.attention.projections import output
from dsv4_jax.config.layer_schedule import draft_layer, layer_schedule
from dsv4_jax.model import forward_draft, forward_streams, param_shapes, quantize_params
from helpers import capture, configs, oracle, slow, tolerance
from pallas_kernels.common.weights import (
    MXFP4,
    BlockFP8,
    decode_weight,
    is_quantized,
    quantize_block_fp8,
    quantize_mxfp4,
    weight_bytes,
)

pytestmark = pytest.mark.unoptimised

FP8 = {
    *(f"attn.{name}" for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "indexer.wq_b")),
    *(f"ffn.shared_{w}" for w in ("w1", "w2", "w3")),
    *("e_proj", "h_proj"),
}
FP4 = {f"ffn.{w}" for w in ("w1", "w2", "w3")}


def formats(params):
    """The kinds of weights, by path without the layer's kind."""
    found = {}
    for path, leaf in jax.tree.leaves_with_path(params, is_leaf=is_quantized):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        for kind in params.layers:
            name = name.removeprefix(f"layers.{kind}.")
        name = name.removeprefix("mtp.").removeprefix("block.")
        found.setdefault(name, set()).add(type(leaf) if is_quantized(leaf) else None)
    return found


def released(config, params):
    """In released formats, and the same decoded to f32."""
    quantised = quantize_params(config, params)
    return quantised, jit_decode(quantised)


@jax.jit
def jit_decode(params):
    return jax.tree.map(decode_weight, params, is_leaf=is_quantized)


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_formats_are_those_of_the_release():
    config = ds.DSV4Config.flash()
    shapes = param_shapes(config, jnp.bfloat16, weights="stored")
    found = formats(shapes)
    assert {name for name, kinds in found.items() if BlockFP8 in kinds} == FP8
    assert {name for name, kinds in found.items() if MXFP4 in kinds} == FP4
    assert all(len(kinds) == 1 for kinds in found.values())
    # deepseek_v4.md 4.5: 159 GB with the draft block, nearly all of it experts.
    experts = sum(
        weight_bytes(layer.ffn.w1) + weight_bytes(layer.ffn.w2) + weight_bytes(layer.ffn.w3)
        for layer in (*shapes.stacked_layers.values(), shapes.mtp.block)
    )
    layers, weights = config.num_layers + 1, 3 * 256 * 2048 * 4096
    assert experts == layers * weights * (1 / 2 + 1 / 32)
    total = weight_bytes(shapes)
    assert total == pytest.approx(159e9, rel=0.01)
    with pytest.raises(ValueError, match=r"weights must be one of .*, got 'fp8'"):
        param_shapes(config, weights="fp8")


@pytest.fixture(scope="module")
def model():
    return configs.two_layers(ds.AttentionType.CSA)


@pytest.mark.slow
def test_quantised_params_have_the_shapes_of_the_release(model):
    config, params = model
    quantised = quantize_params(config, params)
    shapes = param_shapes(config, jnp.float32, weights="stored")
    assert jax.tree.structure(quantised) == jax.tree.structure(shapes)
    for leaf, shape in zip(jax.tree.leaves(quantised), jax.tree.leaves(shapes), strict=True):
        assert (leaf.shape, leaf.dtype) == (shape.shape, shape.dtype)
    assert quantised.dtype == jnp.float32
    again = quantize_params(config, quantised)
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (again, quantised)), strict=True))
    dense, stacked = (tree.stacked_layers["csa_learned"] for tree in (params, quantised))
    alone = quantize_block_fp8(dense.attn.wq_b[1], dtype="float32")
    assert_same(jax.tree.map(lambda leaf: leaf[1], stacked.attn.wq_b), alone)
    alone = quantize_mxfp4(dense.ffn.w2[1, 3], dtype="float32")
    assert_same(jax.tree.map(lambda leaf: leaf[1, 3], stacked.ffn.w2), alone)


@pytest.mark.slow
def test_unstacked_layers_are_those_of_the_stack(model):
    config, params = model
    quantised = quantize_params(config, params)
    separate = ds.unstack_layers(quantised)
    shapes = ds.unstack_layers(param_shapes(config, jnp.float32, weights="stored"))
    assert jax.tree.structure(separate) == jax.tree.structure(shapes)
    for spec in layer_schedule(config):
        layer, stacked = separate.layer(spec), quantised.layer(spec)
        assert layer.ffn.w2.shape == params.layer(spec).ffn.w2.shape
        assert_same(layer, stacked)


def test_params_that_cannot_be_quantised(model):
    config, params = model
    with pytest.raises(ValueError, match="params must be those of config"):
        quantize_params(dataclasses.replace(config, vocab_size=97), params)
    wide = dataclasses.replace(config, moe_intermediate_size=47)
    odd = jax.tree.map(lambda shape: np.zeros(shape.shape, shape.dtype), param_shapes(wide))
    with pytest.raises(ValueError, match=r"even in number.*csa_learned\.ffn\.w2 \[2, 8, 64, 47\]"):
        quantize_params(wide, odd)


def check_intermediates(config, params, token_ids):
    """Of the trunk, and of the draft block where there is one."""
    quantised, decoded = released(config, params)
    options = {"config": config, "activations": "bfloat16"}

    def run(params, token_ids):
        if params.mtp is None:
            return ds.forward(params, token_ids, **options)
        streams = forward_streams(params, token_ids[:, :-1], **options)
        return forward_draft(params, streams, token_ids[:, 1:], **options)

    actual, expected = (
        capture.by_layer(capture.capture(run, weights, token_ids))
        for weights in (quantised, decoded)
    )
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(
            actual[name], values, rtol=0, atol=tolerance.INTERMEDIATE, err_msg=name
        )
    return expected


@pytest.mark.slow
def test_every_intermediate_is_that_of_decoded_weights():
    """A window layer routed by hash, a CSA layer and the draft block."""
    config = dataclasses.replace(
        ds.DSV4Config.tiny(),
        layer_types=(ds.AttentionType.SWA, ds.AttentionType.CSA),
        router_types=(ds.RouterType.HASH, ds.RouterType.LEARNED),
    )
    params = ds.init_params(config, jax.random.key(0))
    token_ids = np.random.default_rng(0).integers(0, config.vocab_size, (2, 24), np.int32)
    check_intermediates(config, params, jnp.asarray(token_ids))


@pytest.mark.slow
@pytest.mark.parametrize("preset", oracle.PRESETS)
def test_every_intermediate_of_the_presets_is_that_of_decoded_weights(preset):
    case = oracle.load_case(preset)
    token_ids = jnp.asarray(case.data["token_ids"])
    expected = check_intermediates(case.config, case.params, token_ids)
    # What the bound would not let pass: the weights before they were quantised.
    logits = ds.forward(case.params, token_ids, config=case.config)
    assert np.max(np.abs(logits - expected["logits"])) > 100 * tolerance.INTERMEDIATE


@pytest.mark.slow
def test_prefill_and_decode_are_those_of_decoded_weights(model):
    """A prefill of two prompts, then twelve greedy tokens by the same program, layers scanned."""
    config, params = model
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, config.vocab_size, count).tolist() for count in (15, 5)]
    answers, logits = [], []
    for weights in released(config, params):
        cache = ds.init_cache(config, max_requests=2, max_context_tokens=64, cache_format="f32")
        texts, drawn = prompts, []
        for _ in range(12):
            cache, row_logits = ds.jit_prefill(
                weights, cache, step_input(texts), config=config, activations="bfloat16"
            )
            texts = np.argmax(row_logits, axis=-1)[:, None].tolist()
            drawn.append(texts)
            logits.append(np.asarray(row_logits))
        answers.append(drawn)
    np.testing.assert_allclose(logits[:12], logits[12:], rtol=0, atol=tolerance.INTERMEDIATE)
    assert answers[0] == answers[1]
    assert len(np.unique(answers[0])) > 5


def step_input(texts):
    """A call of 20 tokens: these of request 0 in slot 1 and of request 1 in slot 0, and none."""
    tokens = [token for text in texts for token in text]
    rows = [row for row, text in enumerate(texts) for _ in text]
    idle = 20 - len(tokens)
    return ds.StepInput(
        token_ids=jnp.asarray(tokens + [0] * idle, jnp.int32),
        request_ids=jnp.asarray(rows + [-1] * idle, jnp.int32),
        request_slots=jnp.asarray([1, 0], jnp.int32),
    )


@pytest.mark.slow
@pytest.mark.parametrize("preset", oracle.PRESETS)
def test_a_hundred_greedy_tokens_are_those_of_decoded_weights(preset):
    case = oracle.load_case(preset)
    prompt = case.data["greedy/prompt"].tolist()
    answers = []
    for weights in released(case.config, case.params):
        engine = ds.Engine(
            case.config, weights, max_requests=2, max_context_tokens=len(prompt) + 100,
            cache_format="f32", prefill_tokens=(16,), decode_tokens=16,
            activations="bfloat16",
        )  # fmt: skip
        (completion,) = engine.generate(
            [prompt], max_new_tokens=100, temperature=0.0, stop_token_ids=()
        )
        answers.append(completion.token_ids)
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 10


@pytest.mark.parametrize(
    ("groups", "rank", "activations"),
    slow.all_but(
        [(2, 96, "fp8")],
        [(2, rank, form) for rank in (128, 96) for form in ("fp8", "bfloat16")],
    ),
)
def test_the_output_projection_never_rounds_its_rows(groups, rank, activations):
    """deepseek_v4.md 4.5: `wo_a` alone is computed in BF16; also where scales span its groups."""
    config = dataclasses.replace(
        ds.DSV4Config.tiny(), o_groups=groups, o_lora_rank=rank, num_attention_heads=2 * groups,
        head_dim=80,
    )  # fmt: skip
    draw = np.random.default_rng(1).standard_normal
    attn = jax.tree.map(
        lambda shape: jnp.asarray(draw(shape.shape, np.float32) * shape.shape[-1] ** -0.5),
        attention_shapes(config, draft_layer(config, 0), f32_shape),
    )
    quantize = functools.partial(quantize_block_fp8, dtype="float32", activations=activations)
    wo_a = jax.jit(quantize)(attn.wo_a)
    attended = draw((2, 2 * groups, 80), np.float32)
    actual, expected = (
        jax.jit(output, static_argnums=2)(dataclasses.replace(attn, wo_a=w), attended, config)
        for w in (wo_a, jax.jit(lambda weight: weight.decode())(wo_a))
    )
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance.INTERMEDIATE)
