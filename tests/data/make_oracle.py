"""Writes oracle_<preset>.npz: what transformers computes for small random DeepSeek-V4 models.

Run by hand, where torch is installed (python 3.11, torch==2.13.0, transformers==5.23.0 wrote the
committed files); the tests only read them:

    python tests/data/make_oracle.py [preset ...]

Weights come from `helpers.oracle.draw_weights` and are not stored. All in f32. Arrays, for B rows
of T tokens, of which P (or P entries of E) are kept, see `helpers.oracle.sample`:

    config, versions         JSON, as transformers writes it; of what wrote the file
    seed, weight_sums        of `draw_weights`
    token_ids                i32[B, T]
    tokens                   i32[P], positions of the kept rows
    <name>, L<i>/<name>      f32[B, P, n], intermediates of one forward pass without a cache; those
                             of L<i>/comp/{normed,entries} and L<i>/idx/{normed,keys} are entries
    L<i>/idx/topk            i16[B, T, K], entries selected, ascending, then -1
    L<i>/idx/margin          f32[B, T], score of the last selected entry above the best one left out
    router_margin            f32, the least such gap among all experts of learned layers
    greedy/prompt            i32[n], the first tokens of row 0
    greedy/token_ids         i32[100], by incremental decoding
    greedy/margin            f32[100], logit of each above the second best
"""

import json
import pathlib
import sys
from unittest import mock

import numpy as np
import torch
import transformers
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache
from transformers.models.deepseek_v4 import modeling_deepseek_v4

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from helpers import oracle

SWA, CSA, HCA = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
NUM_GREEDY = 100
LEAST_MARGIN = 1e-3  # of greedy tokens; fifty times what an intermediate may deviate

COMMON = {
    "vocab_size": 96,
    "hidden_size": 64,
    "head_dim": 32,
    "partial_rotary_factor": 0.25,
    "q_lora_rank": 24,
    "o_lora_rank": 16,
    "moe_intermediate_size": 32,
    "index_n_heads": 32,  # with few heads all may be rectified, and scores of exactly 0 tie
    "index_head_dim": 16,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "rope_theta": 10_000.0,
    "compress_rope_theta": 160_000.0,
    "rope_parameters": oracle.yarn(16.0, 65_536),
    "num_nextn_predict_layers": 0,
    "attn_implementation": "eager",
}


def preset(tokens, prompt, layers, *, heads, num_hash, rates, window, top_k, experts, **more):
    """What a preset adds to COMMON, with its [B, T] and the length of its greedy prompt.

    `heads` are those of attention and the groups of them; `rates` those of CSA and HCA; `experts`
    all of them and those of a token.
    """
    config = {
        "num_attention_heads": heads[0],
        "o_groups": heads[1],
        "layer_types": layers,
        "mlp_layer_types": ["hash_moe"] * num_hash + ["moe"] * (len(layers) - num_hash),
        "compress_rates": dict(zip((CSA, HCA), rates, strict=True)),
        "sliding_window": window,
        "index_topk": top_k,
        "n_routed_experts": experts[0],
        "num_experts_per_tok": experts[1],
    }
    return {"config": config | more, "tokens": tokens, "prompt": prompt}


# fmt: off
PRESETS = {
    # Every attention type twice, a ring that wraps often, a clamp that is really hit.
    "tiny": preset(
        (2, 53), 29, [SWA, CSA, HCA, CSA, HCA, SWA],
        heads=(4, 2), num_hash=2, rates=(4, 8), window=8, top_k=4, experts=(8, 3),
        moe_intermediate_size=48, swiglu_limit=1.5,
    ),
    # The released rates and window.
    "ratios": preset(
        (1, 390), 250, [SWA, HCA, CSA, HCA, CSA],
        heads=(4, 2), num_hash=1, rates=(4, 128), window=128, top_k=16, experts=(8, 2),
    ),
    # The released sizes of a head and of an index head.
    "kernel": preset(
        (1, 170), 140, [SWA, CSA, HCA],
        heads=(4, 2), num_hash=1, rates=(4, 128), window=128, top_k=16, experts=(4, 2),
        head_dim=512, partial_rotary_factor=0.125, q_lora_rank=32, o_lora_rank=32,
        index_n_heads=64, index_head_dim=128,
    ),
    # Flash's order of layers with rates, a window and lengths that share no factor.
    "flash": preset(
        (1, 61), 37, [SWA, SWA, CSA, HCA, CSA, HCA, CSA],
        heads=(8, 4), num_hash=5, rates=(3, 20), window=5, top_k=7, experts=(6, 4),
    ),
    # Pro's order of layers, a wide top-k, other tables, streams and groups; two tokens end a text.
    "pro": preset(
        (1, 201), 115, [HCA, HCA, CSA, HCA, CSA],
        heads=(8, 8), num_hash=3, rates=(4, 16), window=16, top_k=24, experts=(12, 5),
        routed_scaling_factor=2.5, hc_mult=2, hc_sinkhorn_iters=7, compress_rope_theta=40_000.0,
        rope_parameters=oracle.yarn(4.0, 4096), eos_token_id=[1, 5],
    ),
}
# fmt: on


class Recorder:
    """Collects intermediates [B, T or E, ...] by the names that our code tags them with."""

    def __init__(self, model):
        self.values = {}
        self.layer_of = {}
        core = model.model
        self.after(core.embed_tokens, "embed")
        self.after(core.hc_head, "head/collapsed")
        self.after(core.norm, "head/normed")
        self.after(model.lm_head, "logits")
        for i, layer in enumerate(core.layers):
            self.watch_layer(layer, f"L{i}")

    def run(self, model, ids):
        """One forward pass without a cache; rotated queries are arguments of a plain function."""
        attend = modeling_deepseek_v4.eager_attention_forward

        def watched(module, q, kv, v, mask, **kwargs):
            ctx, probs = attend(module, q, kv, v, mask, **kwargs)
            at = self.layer_of[module]
            self.values |= {f"{at}/q": q.transpose(1, 2), f"{at}/ctx": ctx}
            self.values[f"{at}/kv"] = kv[:, 0, : q.shape[2]]  # entries follow, kept on their own
            return ctx, probs

        with mock.patch.object(modeling_deepseek_v4, "eager_attention_forward", watched):
            model(ids, use_cache=False)
        return self.values

    def after(self, module, name, pick=lambda inputs, output: output):
        module.register_forward_hook(
            lambda _, inputs, output: self.values.update({name: pick(inputs, output)})
        )

    def before(self, module, name, which=0):
        module.register_forward_pre_hook(
            lambda _, inputs: self.values.update({name: inputs[which]})
        )

    def watch_layer(self, layer, at):
        attn, mlp = layer.self_attn, layer.mlp
        self.layer_of[attn] = at
        self.before(layer, f"{at}/in")
        for mix, module in (("attn_hc", layer.attn_hc), ("ffn_hc", layer.ffn_hc)):
            for i, what in enumerate(("post", "comb", "collapsed")):
                self.after(module, f"{at}/{mix}/{what}", lambda _, out, i=i: out[i])
        self.after(layer.input_layernorm, f"{at}/attn_in")
        self.after(attn.q_a_norm, f"{at}/q_lora")
        self.after(attn.q_b_proj, f"{at}/q_b")
        self.after(attn.q_b_norm, f"{at}/q_normed", lambda _, out: out.transpose(1, 2))
        self.after(attn.kv_proj, f"{at}/kv_lin")
        self.after(attn.kv_norm, f"{at}/kv_normed")
        self.before(attn.o_a_proj, f"{at}/ctx_derot")
        self.after(attn.o_a_proj, f"{at}/o_a")
        self.after(attn.o_b_proj, f"{at}/attn_out")
        if attn.compressor is not None:
            self.watch_compressor(attn.compressor, f"{at}/comp")
            self.after(attn.compressor, f"{at}/comp/entries", lambda _, out: out[0].squeeze(1))
        indexer = getattr(attn.compressor, "indexer", None)
        if indexer is not None:
            self.watch_compressor(indexer, f"{at}/idx")
            self.before(indexer.scorer, f"{at}/idx/q", 0)
            self.before(indexer.scorer, f"{at}/idx/keys", 1)
            self.after(indexer.scorer.weights_proj, f"{at}/idx/weights")
            self.after(indexer.scorer, f"{at}/idx/scores")
            self.after(indexer, f"{at}/idx/topk")
        self.after(layer.post_attention_layernorm, f"{at}/mlp_in")
        for i, what in enumerate(("logits", "weights", "indices")):
            self.after(mlp.gate, f"{at}/gate/{what}", lambda _, out, i=i: out[i])
        self.after(mlp.experts, f"{at}/routed")
        self.after(mlp.shared_experts, f"{at}/shared")
        self.after(mlp, f"{at}/mlp_out")
        self.after(layer, f"{at}/out")

    def watch_compressor(self, compressor, at):
        self.after(compressor.kv_proj, f"{at}/kv")
        self.after(compressor.gate_proj, f"{at}/gate")
        self.after(compressor.kv_norm, f"{at}/normed")


def build(config, weights):
    model = DeepseekV4ForCausalLM(config).eval()
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert shapes == {name: array.shape for name, array in weights.items()}
    model.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    return model


def gap(scores, count):
    """[..., E] -> [...]: the count-th best above the next; infinite where there is no next."""
    if scores.shape[-1] <= count:
        return torch.full(scores.shape[:-1], torch.inf)
    best = scores.topk(count + 1).values
    return torch.where(best[..., count].isinf(), torch.inf, best[..., count - 1] - best[..., count])


def index_arrays(config, at, values):
    """Selected entries in ascending order, and how clearly they won."""
    topk, scores = values.pop(f"{at}/idx/topk"), values[f"{at}/idx/scores"]
    num_entries = scores.shape[-1]
    topk = torch.where(topk < 0, num_entries, topk).sort(-1).values
    visible = (torch.arange(scores.shape[1]) + 1) // config.compress_rates[CSA]
    hidden = torch.arange(num_entries) >= visible[:, None]
    return {
        f"{at}/idx/topk": torch.where(topk == num_entries, -1, topk).to(torch.int16),
        f"{at}/idx/margin": gap(scores.masked_fill(hidden, -torch.inf), config.index_topk),
    }


def router_margin(config, model, values):
    """The least gap between experts picked and left out, over all tokens of learned layers."""
    least = torch.inf
    for i, layer in enumerate(model.model.layers):
        if config.mlp_layer_types[i] == "moe":
            scores = torch.nn.functional.softplus(values[f"L{i}/gate/logits"]).sqrt()
            scores = scores + layer.mlp.gate.e_score_correction_bias
            least = min(least, gap(scores, config.num_experts_per_tok).min().item())
    return np.float32(least)


def in_expert_order(at, values):
    """Sorts each token's experts by number, since the order in which they were picked is free."""
    order = values[f"{at}/gate/indices"].argsort(-1)
    for what in ("indices", "weights"):
        name = f"{at}/gate/{what}"
        values[name] = values[name].gather(-1, order)


def greedy(model, config, prompt):
    """Tokens and margins of incremental decoding, checked against one pass over all of them."""
    cache, new, picked, margins = DynamicCache(config=config), prompt[None], [], []
    for _ in range(NUM_GREEDY):
        logits = model(new, past_key_values=cache, use_cache=True).logits[0, -1]
        new = logits.argmax().reshape(1, 1)
        picked.append(new.item())
        margins.append(gap(logits, 1).item())
    again = model(torch.cat([prompt, torch.tensor(picked)])[None], use_cache=False).logits[0]
    assert again[len(prompt) - 1 : -1].argmax(-1).tolist() == picked
    assert min(margins) > LEAST_MARGIN, f"greedy margin {min(margins)}: take another seed"
    return np.array(picked, np.int32), np.array(margins, np.float32)


@torch.no_grad()
def make(preset, seed):
    config = DeepseekV4Config(
        **COMMON
        | PRESETS[preset]["config"]
        | {"num_hidden_layers": len(PRESETS[preset]["config"]["layer_types"])}
    )
    as_dict = config.to_dict()
    weights = oracle.draw_weights(as_dict, seed)
    model = build(config, weights)
    batch, num_tokens = PRESETS[preset]["tokens"]
    ids = np.random.default_rng(seed + 1).integers(0, config.vocab_size, (batch, num_tokens))
    ids = torch.from_numpy(ids)
    prompt = ids[0, : PRESETS[preset]["prompt"]]
    picked, margins = greedy(model, config, prompt)

    values = {
        name: value.reshape(batch, num_tokens, -1) if len(value) == ids.numel() else value
        for name, value in Recorder(model).run(model, ids).items()
    }
    arrays = {"router_margin": router_margin(config, model, values)}
    for i in range(config.num_hidden_layers):
        in_expert_order(f"L{i}", values)
        if f"L{i}/idx/topk" in values:
            arrays |= index_arrays(config, f"L{i}", values)
    tokens = oracle.chosen_tokens(as_dict, num_tokens)
    for name, value in values.items():
        rows = tokens
        if value.shape[1] != num_tokens:
            attn = config.layer_types[int(name[1 : name.index("/")])]
            rows = oracle.chosen_entries(tokens, config.compress_rates[attn])
        arrays[name] = oracle.sample(value.float().numpy(), rows)
    versions = {module.__name__: module.__version__ for module in (np, torch, transformers)}
    np.savez_compressed(
        oracle.path(preset),
        **arrays,
        config=json.dumps(as_dict),
        versions=json.dumps(versions),
        seed=seed,
        weight_sums=oracle.weight_sums(weights),
        token_ids=ids.int().numpy(),
        tokens=tokens.astype(np.int32),
        **{"greedy/prompt": prompt.int().numpy(), "greedy/token_ids": picked},
        **{"greedy/margin": margins},
    )
    selection = min(array.min().item() for name, array in arrays.items() if "idx/margin" in name)
    print(
        f"{preset}: {oracle.path(preset).stat().st_size / 1e6:.2f} MB, {len(tokens)} tokens kept; "
        f"least margins: selection {selection:.1e}, router {arrays['router_margin']:.1e}, "
        f"greedy {margins.min():.1e}; {len(set(picked.tolist()))} distinct greedy tokens"
    )


# Chosen for margins that no rounding crosses: of greedy tokens, experts and index scores.
SEEDS = {"tiny": 11, "ratios": 8, "kernel": 7, "flash": 13, "pro": 7}

if __name__ == "__main__":
    torch.set_num_threads(1)  # the tensors are tiny, and two runs are bit for bit alike
    for name in sys.argv[1:] or PRESETS:
        make(name, SEEDS[name])
