"""vLLM's Humming experts in MXFP4, for the calls of `bench_expert_mlp`.

Humming is a package of its own, which compiles its kernels when they are first asked for. They are
called as vLLM calls them on Hopper, with vLLM's launches around them.
"""

import concurrent.futures
import functools
import importlib.util
import json
import os
import sys

from benchmarks import rival_experts, vllm_stand_in

ROWS = ("bfloat16", "fp8")
"""How the rows that it multiplies are rounded."""
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_PICKS = 6


class Humming:
    """Products by kernels made at run time, of rows in BF16 or rounded to FP8 in groups of 128."""

    def __init__(self, libraries, folder, sum_file, tokens, model, limit):
        """Compiles the kernels of a model, and draws its weights.

        Args:
          libraries: vLLM's, of which one sorts the picks.
          folder: of the package `humming`.
          sum_file: vLLM's `moe_fused_mul_sum.py`, unmodified.
          tokens: the numbers of tokens that will be timed.
          model: experts, D and I.
          limit: of SwiGLU.
        """
        import torch

        rival_experts.load(libraries)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        self._sum = _load_sum(sum_file)
        self._model, self._limit = model, limit
        num_experts, dim, width = model
        shapes = (2 * width, dim), (dim, width)
        counts = {1, _PICKS} | {_PICKS * number for number in tokens}
        products = {
            rows: [_Product(num_experts, *shape, rows, counts) for shape in shapes] for rows in ROWS
        }
        every = [product for pair in products.values() for product in pair]
        with concurrent.futures.ThreadPoolExecutor(len(every)) as pool:
            for compiled in [pool.submit(product.compile) for product in every]:
                compiled.result()
        raw = [
            (
                rival_experts.random(num_experts, out, into // 8, **rival_experts.CODES),
                rival_experts.random(
                    num_experts, out, into // rival_experts.GROUP, **rival_experts.SCALES
                ),
            )
            for out, into in shapes
        ]
        self._sample = rival_experts.Call([list(range(_PICKS))], model, limit)
        self._expected = _result(self._sample, raw)
        self._layers = {}
        for rows, pair in products.items():
            weights = [
                product.weights(codes.clone(), scales.clone())
                for product, (codes, scales) in zip(pair, raw, strict=True)
            ]
            self._layers[rows] = list(zip(pair, weights, strict=True))
            torch.cuda.empty_cache()

    def time_us(self, routings, rows):
        """Median microseconds of calls with these routings, after a check of one token's result."""
        layers = self._layers[rows]
        self._run(self._sample, layers)
        self._sample.check(self._expected)
        calls = [rival_experts.Call(ids, self._model, self._limit) for ids in routings]
        return rival_experts.median_us(
            [functools.partial(self._run, each, layers) for each in calls]
        )

    def _run(self, call, layers):
        (first, gate_up), (second, down) = layers
        tile = first.tile(call.num_rows)
        order = call.sort(tile)
        first.multiply(gate_up, call.x, call.gate_up, order, call.num_picks)
        if second.tile(call.num_rows) != tile:
            order = call.sort(second.tile(call.num_rows))
        limit = f"{call.limit:.1f}f"
        gate, up = f"fminf(a, {limit})", f"fmaxf(fminf(b, {limit}), -{limit})"
        swiglu = f"({gate} / (1.f + expf(-{gate}))) * {up}"
        second.multiply(down, call.gate_up, call.down, order, 1, swiglu)
        self._sum(inputs=call.parts, topk_weights=call.share, topk_ids=call.ids, outputs=call.out)


class _Product:
    """One of Humming's products of all experts."""

    def __init__(self, num_experts, out, into, rows, counts):
        import humming.config
        import humming.forward
        import humming.schema
        import humming.transform
        import humming.tune
        import torch

        self._forward, self._transform = humming.forward, humming.transform
        options = {
            "bfloat16": {"input_quant_mode": "none"},
            "fp8": {
                "a_dtype": "float8e4m3",
                "input_scale_group_size": 128,
                "input_scale_dtype": "float32",
                "input_quant_mode": "dynamic_group",
            },
        }
        self._config = humming.transform.prepare_layer_config(
            shape_n=out,
            shape_k=into,
            weight_schema=humming.schema.Mxfp4WeightSchema().to_humming_schema(torch.bfloat16),
            input_schema=humming.schema.HummingInputSchema(**options[rows]),
            num_experts=num_experts,
            pad_n_to_multiple=256,
            pad_k_to_multiple=128,
            torch_dtype=torch.bfloat16,
            device=torch.device("cuda", 0),
        )
        gemm = humming.config.GemmType.INDEXED
        compute = {"use_batch_invariant": False, "use_f16_accum": False}
        tuned = humming.tune.get_heuristics_config(
            layer_config=self._config, gemm_type=gemm, **compute
        )
        self._tuned = [each for each in tuned if any(each[0] < n <= each[1] for n in counts)]
        self._compute = json.dumps(compute | {"gemm_type": gemm.value})
        self._locks = torch.zeros(rival_experts.LOCKS, dtype=torch.int32, device="cuda")

    def compile(self):
        import torch

        torch.ops.humming.prepare_kernels(
            self._locks, self._config.to_str(), self._compute, json.dumps(self._tuned)
        )

    def weights(self, codes, scales):
        """In Humming's layout."""
        import torch

        tensors = {"weight": codes, "weight_scale": scales.view(torch.float8_e8m0fnu)}
        made = self._transform.transform_humming_tensors(self._config, tensors)
        return {name: made.get(name) for name in ("weight", "weight_scale", "weight_scale_2")}

    def tile(self, num_rows):
        """Rows of a tile that the package chooses for so many."""
        for low, high, tuned in self._tuned:
            if low < num_rows <= high:
                return tuned["block_shape"][0]
        raise ValueError(f"humming has no tiles for {num_rows} rows")

    def multiply(self, weights, x, product, order, num_picks, swiglu=None):
        """Rounds the rows if need be, after the activation if there is one, and multiplies."""
        mode = self._config.input_quant_mode
        activation = {"activation_type": "binary_split", "activation_impl": swiglu}
        scale = second_scale = None
        if swiglu or mode.should_quantize:
            x, groups, tokens = self._forward.may_process_input(
                self._config, inputs=x, **(activation if swiglu else {})
            )
            scale = groups if mode.has_group_scale else tokens
            second_scale = tokens if mode.has_secondary_scale else None
        rows, experts, total = order
        self._forward.humming_forward(
            self._config,
            inputs=x,
            outputs=product,
            input_scale=scale,
            input_scale_2=second_scale,
            sorted_ids=rows,
            expert_ids=experts,
            num_tokens_padded=total,
            locks=self._locks,
            top_k=num_picks,
            valid_shape_m=len(product),
            compute_config=self._compute,
            tuning_config=json.dumps(self._tuned),
            **weights,
        )


def _load_sum(path):
    """The function `moe_fused_mul_sum` of a file of vLLM."""
    vllm_stand_in.stand_in(os.path.dirname(path))
    spec = importlib.util.spec_from_file_location("moe_fused_mul_sum", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.moe_fused_mul_sum


def _result(call, raw):
    """f32[1, dim] of a call with one token."""
    total = 0.0
    for expert in call.ids[0].tolist():
        gate_up, down = (_unpacked(codes[expert], scales[expert]) for codes, scales in raw)
        gate, up = (call.x.float() @ gate_up.T).chunk(2, dim=1)
        total = total + rival_experts.swiglu(gate, up, call.limit) @ down.T / call.num_picks
    return total


def _unpacked(codes, scales):
    """f32[out, into] of words of eight codes, the lowest first, and bytes of scales."""
    import torch

    nibbles = (codes[..., None] >> (4 * torch.arange(8, device=codes.device))) & 15
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=codes.device)
    scale = torch.exp2(scales.float() - 127).repeat_interleave(rival_experts.GROUP, dim=1)
    return values[nibbles.flatten(1).long()] * scale
