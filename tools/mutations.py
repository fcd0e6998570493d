"""Plants one fault at a time and runs the tests of its room, of which one has to fail.

    python -m tools.mutations --list
    python -m tools.mutations                             all of them, about half an hour
    python -m tools.mutations --only commit_counts sink   some
    python -m tools.mutations --only kernel_              those whose names begin so

Each fault is an edit of one line in a temporary copy of the tree. The default tests run first, and
those marked slow only where all of them pass. A fault is caught if a test fails; if none does it
survives, and the exit status is 1. It is 1 too if the tests can't be collected: then they say
nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

import pytest

ROOT = pathlib.Path(__file__).parents[1]
ALL_PASSED, NONE_CHOSEN = "survived", "no test was chosen"
LEFT_OUT = (".git", ".venv", "build", "__pycache__", "*.egg-info", ".pytest_cache", ".hypothesis")


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One fault.

    Attributes:
      name: what the command line calls it.
      file: path from the root of the repository.
      old: text that occurs in the file once.
      new: what takes its place.
      tests: files or folders below `tests/`, of which some test has to fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def _mutations(folder: str, *rows: tuple[str, str, str, str, str]) -> list[Mutation]:
    """Rows are name, file in the folder, old text, new text, and tests, separated by spaces."""
    return [
        Mutation(name, f"{folder}/{file}", old, new, tuple(tests.split()))
        for name, file, old, new, tests in rows
    ]


MUTATIONS = [
    *_mutations(
        "pallas_kernels/peer_collectives",
        (
            "sums_of_many_devices_in_an_order_of_nccl_s",
            "reference.py",
            "if devices == 2:",
            "if devices >= 2:",
            "dsv4_jax/step/test_mesh.py",
        ),
        (
            "scattered_sums_lack_what_is_added",
            "op.py",
            "reference.reduce_scatter(_sum_here(terms), axis_name)",
            "reference.reduce_scatter(_sum_here(terms[:1]), axis_name)",
            "pallas_kernels/peer_collectives/test_peer_collectives.py",
        ),
        (
            "scattered_sums_in_an_order_of_nccl_s",
            "reference.py",
            "if jax.lax.axis_size(axis_name) == 2:",
            "if jax.lax.axis_size(axis_name) >= 2:",
            "dsv4_jax/step/test_mesh.py",
        ),
        (
            "one_slot_for_all_turns",
            "ptx.py",
            "and.b32 half, turn, 1;",
            "and.b32 half, turn, 0;",
            "pallas_kernels/peer_collectives",
        ),
        (
            "slots_stay_full",
            "ptx.py",
            "return [*text, _store(where, [_NONE] * _WORDS)]",
            "return text",
            "pallas_kernels/peer_collectives",
        ),
        (
            "what_stands_for_nothing_is_sent",
            "ptx.py",
            "0x{EMPTY - 1:08X}",
            "0x{EMPTY:08X}",
            "pallas_kernels/peer_collectives",
        ),
        (
            "gathered_lines_are_not_filled_up",
            "op.py",
            "-x.size % (LINE_BYTES // x.dtype.itemsize)",
            "0",
            "pallas_kernels/peer_collectives",
        ),
    ),
    *_mutations(
        "dsv4_jax",
        (
            "attention_without_peer_buffers",
            "model/block.py",
            "with using(peers):\n        return _attention_sublayer(",
            "with using(None):\n        return _attention_sublayer(",
            "dsv4_jax/test_peers.py",
        ),
        (
            "experts_without_peer_buffers",
            "model/block.py",
            "with using(peers):\n        return _experts_sublayer(",
            "with using(None):\n        return _experts_sublayer(",
            "dsv4_jax/test_peers.py",
        ),
        (
            "a_process_has_buffers_alone",
            "peers.py",
            "_raise_of_any_process(mesh, None)\n    return result",
            "return result",
            "dsv4_jax/test_peers.py",
        ),
        (
            "memory_outlives_its_arrays",
            "peer_memory.py",
            "_exported.pop(address, None)",
            "_exported.get(address)",
            "dsv4_jax/test_peer_memory.py",
        ),
        (
            "all_devices_see_what_the_first_rows_see",
            "cache/handle.py",
            "{name: take_rows(getattr(call, name), own) for",
            "{name: getattr(call, name)[:own] for",
            "dsv4_jax/step/test_mesh.py",
        ),
        (
            "each_device_takes_the_first_rows",
            "collectives.py",
            "place_on(MODEL) * own, own)",
            "place_on(MODEL) * 0, own)",
            "dsv4_jax/step/test_mesh.py",
        ),
        (
            "rows_that_do_not_divide_are_dealt",
            "collectives.py",
            " and num_rows % devices == 0\n",
            "\n",
            "dsv4_jax/step/test_mesh.py",
        ),
        (
            "a_pause_makes_a_call_shorter",
            "bench/timing.py",
            "statistics.median(befores or [0.0])",
            "max(befores or [0.0])",
            "dsv4_jax/bench/test_timing.py",
        ),
        (
            "nobody_waits_for_the_others",
            "hosts.py",
            "for other in range(self.count):",
            "for other in range(0):",
            "dsv4_jax/test_hosts.py",
        ),
        (
            "a_process_swallows_sigterm",
            "hosts.py",
            '"jax_enable_preemption_service", False',
            '"jax_enable_preemption_service", True',
            "dsv4_jax/test_hosts.py",
        ),
        (
            "peers_of_the_other_axis",
            "peers.py",
            "AXES.index(axis), -1",
            "1 - AXES.index(axis), -1",
            "dsv4_jax/test_peers.py",
        ),
    ),
    *_mutations(
        "dsv4_jax/cache",
        (
            "commit_counts_afresh",
            "commit.py",
            "cache.length_tokens.at[slots].add(call.row_counts",
            "cache.length_tokens.at[slots].set(call.row_counts",
            "dsv4_jax/cache/test_append.py",
        ),
        (
            "handle_sees_an_entry_late",
            "handle.py",
            "(self.call.positions + 1) // self.schema.compression_ratio",
            "self.call.positions // self.schema.compression_ratio",
            "dsv4_jax/cache/test_handle.py",
        ),
        (
            "handle_selects_one_too_many",
            "handle.py",
            "everything < self.visible_entries[:, None]",
            "everything <= self.visible_entries[:, None]",
            "dsv4_jax/cache/test_handle.py",
        ),
        (
            "views_are_one_row_off",
            "views.py",
            "(length[:, None] - 1 - jnp.arange(window)[None]) % window",
            "(length[:, None] - jnp.arange(window)[None]) % window",
            "dsv4_jax/cache/test_handle.py",
        ),
        (
            "views_drop_the_open_block",
            "views.py",
            "return -(-tokens // handle.schema.block_tokens)",
            "return tokens // handle.schema.block_tokens",
            "dsv4_jax/cache/test_handle.py",
        ),
        (
            "snapshot_of_the_wrong_rows",
            "snapshots.py",
            "last - (last - ring_row) % size",
            "last - (last + ring_row) % size",
            "dsv4_jax/serving/test_prefix_reuse.py",
        ),
        (
            "snapshot_into_the_wrong_tail_rows",
            "snapshots.py",
            "% (2 * compression_ratio)",
            "% compression_ratio",
            "dsv4_jax/serving/test_prefix_reuse.py",
        ),
        (
            "changes_wrap",
            "slot_changes.py",
            "drop_absent(jnp.asarray(targets), plane.shape[1])",
            "jnp.asarray(targets)",
            "dsv4_jax/allocator dsv4_jax/serving/test_engine_life.py",
        ),
        (
            "a_token_beyond_the_context",
            "step_input.py",
            "(positions < block_table.shape[1] * block_tokens)",
            "(positions <= block_table.shape[1] * block_tokens)",
            "dsv4_jax/cache/test_step_input.py",
        ),
    ),
    *_mutations(
        "dsv4_jax/allocator",
        (
            "block_freed_under_its_last_owner",
            "block_pool.py",
            "        if not self.owners[block]:",
            "        if self.owners[block] <= 1:",
            "dsv4_jax/allocator",
        ),
        (
            "tree_ignores_the_salt",
            "prefix_tree.py",
            "hashlib.blake2b(salt, digest_size=_DIGEST_BYTES, person=",
            'hashlib.blake2b(b"", digest_size=_DIGEST_BYTES, person=',
            "dsv4_jax/allocator",
        ),
        (
            "tree_evicts_the_newest_snapshot",
            "prefix_tree.py",
            "next(iter(self._snapshots.values()))",
            "next(reversed(self._snapshots.values()))",
            "dsv4_jax/allocator",
        ),
        (
            "tree_forgets_its_parent",
            "prefix_tree.py",
            "            node.parent.num_children -= 1\n",
            "            node.parent.num_children -= 0\n",
            "dsv4_jax/allocator",
        ),
        (
            "plan_rounds_blocks_down",
            "pool_plan.py",
            "-(-total // self.block_tokens)",
            "max(total // self.block_tokens, 1)",
            "dsv4_jax/allocator",
        ),
        (
            "manager_hits_the_last_token",
            "prefix_cache.py",
            "min(max(len(token_ids) - 1, 0), max_tokens)",
            "min(len(token_ids), max_tokens)",
            "dsv4_jax/allocator",
        ),
        (
            "manager_forks_without_the_open_block",
            "manager.py",
            "if open_tokens else (-1, -1)",
            "if not open_tokens else (-1, -1)",
            "dsv4_jax/allocator",
        ),
        (
            "changes_forget_a_pending_load",
            "pending_changes.py",
            "        if source in self.loads:",
            "        if source in ():",
            "dsv4_jax/allocator",
        ),
    ),
    *_mutations(
        "dsv4_jax/serving",
        (
            "programs_compiled_side_by_side_are_others",
            "device/engine_arrays.py",
            "lowered = program.lower(*arguments, **static)",
            'lowered = program.lower(*arguments, **static | {"activations": "bfloat16"})',
            "dsv4_jax/serving/device/test_programs.py",
        ),
        (
            "stop_text_shows_as_it_begins",
            "requests/text.py",
            "return text[:place], end",
            'return text, ""',
            "dsv4_jax/serving/requests/test_text.py",
        ),
        (
            "prompt_is_penalised",
            "device/drawn_counts.py",
            "request.known[request.prompt_tokens + tally.num_counted :]",
            "request.known[tally.num_counted :]",
            "dsv4_jax/serving/test_draw_settings.py",
        ),
        (
            "samples_draw_with_one_seed",
            "engine.py",
            "asked.sampling.with_seed(seed)",
            "asked.sampling",
            "dsv4_jax/serving/test_draw_settings.py",
        ),
        (
            "oldest_prompt_takes_all",
            "schedule/scheduler.py",
            "left if not others else -(-left // 2)",
            "left",
            "dsv4_jax/serving/schedule/test_scheduler.py",
        ),
        (
            "draws_before_the_prompt_ends",
            "schedule/scheduler.py",
            "chunk == need.num_pending)",
            "True)",
            "dsv4_jax/serving/schedule/test_scheduler.py",
        ),
        (
            "no_blocks_for_drafts",
            "schedule/request_queue.py",
            "num_known + self._step_tokens, table.totals",
            "num_known + 1, table.totals",
            "dsv4_jax/serving",
        ),
        (
            "preempts_the_oldest",
            "schedule/request_queue.py",
            "self.shards.shard_of(request.slot))[-1])",
            "self.shards.shard_of(request.slot))[0])",
            "dsv4_jax/serving/schedule/test_request_queue.py",
        ),
        (
            "interrupted_steps_keep_tokens",
            "device/hand_out.py",
            "            self._undo.save(request)\n            tokens",
            "            tokens",
            "dsv4_jax/serving/test_interrupts.py",
        ),
        (
            "moves_the_arrays_of_a_step",
            "device/engine_arrays.py",
            "donate_argnums=0, keep_unused=True)",
            "keep_unused=True)",
            "dsv4_jax/serving/test_overlap.py",
        ),
        (
            "keeps_an_old_input",
            "device/engine_arrays.py",
            "if contents != self._input[0]:",
            "if not self._input[0]:",
            "dsv4_jax/serving/test_overlap.py",
        ),
        (
            "warmup_leaves_a_copy_out",
            "device/engine_arrays.py",
            "shown = _copied(dataclasses.replace(output, logprobs=None))\n"
            "        if wants_logprobs:",
            "shown = output if wants_logprobs else dataclasses.replace(output, logprobs=None)\n"
            "        shown = _copied(shown)\n"
            "        if wants_logprobs:",
            "dsv4_jax/serving/device/test_programs.py",
        ),
        (
            "brings_the_same_input_anew",
            "device/engine_arrays.py",
            "if contents != self._input[0]:",
            "if contents:",
            "dsv4_jax/serving/test_overlap.py",
        ),
        (
            "takes_half_characters_for_whole",
            "device/hand_out.py",
            "known.holds_text[slots[row]] = request.holds_text",
            "pass",
            "dsv4_jax/serving/requests/test_text.py",
        ),
        (
            "interrupted_steps_keep_a_row",
            "schedule/known_tokens.py",
            "for array in (row, self.num_known[at]",
            "for array in (self.num_known[at]",
            "dsv4_jax/serving/schedule/test_known_tokens.py",
        ),
        (
            "interrupted_steps_keep_the_cache",
            "engine_core.py",
            "            self.loop.restart(unfinished)\n",
            "            pass\n",
            "dsv4_jax/serving/test_interrupts.py",
        ),
        (
            "a_look_hands_out_tokens",
            "loop.py",
            "            self._read(self.flight, None)\n",
            "            self._read(self.flight, None)\n            self._give(self.flight)\n",
            "dsv4_jax/serving/test_forks.py",
        ),
        (
            "forks_leave_out_what_nobody_got",
            "requests/request.py",
            "new.num_given = max(self.num_given, returned)",
            "new.num_given = self.num_drawn",
            "dsv4_jax/serving/test_forks.py",
        ),
        (
            "suspects_are_cleared_by_any_step",
            "schedule/suspects.py",
            "request.num_known >= goal",
            "True",
            "dsv4_jax/serving/test_draw_errors.py",
        ),
        (
            "simple_steps_for_any_request",
            "device/runner.py",
            "self.simplifies and running.is_simple and",
            "self.simplifies and",
            "dsv4_jax/serving/test_overlap.py",
        ),
        (
            "shares_rejected_drafts",
            "loop.py",
            "result.token_ids[request.slot, :more]",
            "result.token_ids[request.slot, 1 : more + 1]",
            "dsv4_jax/serving",
        ),
        (
            "a_step_repeats_that_of_other_requests",
            "schedule/flight.py",
            "            repeats = False",
            "            repeats = True",
            "dsv4_jax/serving/test_overlap.py",
        ),
        (
            "a_step_repeats_for_requests_that_have_ended",
            "schedule/flight.py",
            "repeats=repeats and bool(goes_on.all())",
            "repeats=repeats",
            "dsv4_jax/serving/test_overlap.py",
        ),
        (
            "calls_pass_a_snapshot",
            "schedule/step_plans.py",
            "    if pools.num_snapshots:\n        most =",
            "    if False:\n        most =",
            "dsv4_jax/serving/test_steps_per_call.py",
        ),
        (
            "calls_pass_the_end_of_a_request",
            "schedule/step_plans.py",
            "most = outlook.running.totals - outlook.num_known",
            "most = outlook.running.totals - outlook.num_known + 1",
            "dsv4_jax/serving/test_steps_per_call.py",
        ),
        (
            "calls_have_blocks_for_one_step",
            "loop.py",
            "max(plan.draft_tokens + 1, plan.steps_per_call)",
            "plan.draft_tokens + 1",
            "dsv4_jax/serving/test_steps_per_call.py",
        ),
        (
            "snapshots_after_the_first_of_several_steps",
            "schedule/step_boundaries.py",
            "outlook.lengths[places] + plan.rows.num_appended",
            "outlook.lengths[places] + 1",
            "dsv4_jax/serving/test_steps_per_call.py",
        ),
        (
            "calls_of_several_steps_drop_penalties",
            "device/runner.py",
            "if running.penalises or running.is_constrained or running.wants_logprobs.any():",
            "if running.is_constrained:",
            "dsv4_jax/serving/test_steps_per_call.py",
        ),
        (
            "calls_wait_for_idle_requests",
            "schedule/scheduler.py",
            "or 2 * steps.mean() < steps_per_call",
            "",
            "dsv4_jax/serving/test_steps_per_call.py",
        ),
    ),
    *_mutations(
        "dsv4_jax/step",
        (
            "rows_make_a_step_more",
            "decode_steps.py",
            "number < steps_of_token",
            "number <= steps_of_token",
            "dsv4_jax/step/test_decode_steps.py",
        ),
        (
            "every_step_takes_the_first_token",
            "decode_steps.py",
            "return (cache, jnp.maximum(drawn, 0)[row])",
            "return (cache, step_input.token_ids)",
            "dsv4_jax/serving/test_steps_per_call.py",
        ),
        (
            "noise_without_the_position",
            "draws.py",
            "jax.random.fold_in(jax.random.key(seed), position)",
            "jax.random.key(seed)",
            "dsv4_jax/step/test_sampling.py",
        ),
        (
            "top_p_takes_one_less",
            "draws.py",
            "before = jnp.cumsum(ranked, axis=-1) - ranked",
            "before = jnp.cumsum(ranked, axis=-1)",
            "dsv4_jax/step/test_sampling.py",
        ),
        (
            "of_equal_logits_all_are_left",
            "draws.py",
            "((scaled == least) & of_equals)",
            "(scaled == least)",
            "dsv4_jax/step/test_sampling.py",
        ),
        (
            "simple_draws_ignore_min_p",
            "draws.py",
            "jnp.where(_likely(scaled, sampling), scaled + noise, -jnp.inf)",
            "scaled + noise",
            "dsv4_jax/step/test_draws.py",
        ),
        (
            "noise_of_the_first_part",
            "draws.py",
            "whole, first, num_tokens",
            "whole, 0, num_tokens",
            "dsv4_jax/step/test_mesh.py",
        ),
        (
            "drafts_are_not_penalised",
            "draws.py",
            "jnp.where(draft < place, drafts[:, None], -1)",
            "jnp.where(draft < 0, drafts[:, None], -1)",
            "dsv4_jax/step/test_draws.py",
        ),
        (
            "logprobs_without_their_sum",
            "draws.py",
            "drawn=(own - largest - log_sum)[..., 0]",
            "drawn=(own - largest)[..., 0]",
            "dsv4_jax/step/test_draws.py",
        ),
    ),
    *_mutations(
        "dsv4_jax/attention",
        (
            "main_table_for_all",
            "rope.py",
            "if attn == AttentionType.SWA:",
            "if attn in AttentionType:",
            "dsv4_jax/attention/test_rope.py",
        ),
        (
            "yarn_the_wrong_way_round",
            "rope.py",
            "stretched * ramp + plain * (1 - ramp)",
            "stretched * (1 - ramp) + plain * ramp",
            "dsv4_jax/attention/test_rope.py",
        ),
        (
            "first_window_sees_zeros",
            "compressor.py",
            "scores[..., dim:], -jnp.inf)",
            "scores[..., dim:], 0.0)",
            "dsv4_jax/model/test_against_transformers.py",
        ),
    ),
    *_mutations(
        "dsv4_jax",
        (
            "weights_that_kernels_round_are_sought_in_rows",
            "checkpoint/spread.py",
            "axis=(1, 3)",
            "axis=3",
            "dsv4_jax/checkpoint/test_stored_weights.py",
        ),
        (
            "up_projection_loaded_as_gate",
            "checkpoint/named_sources.py",
            '"gate_up_proj": ("w1", "w3")',
            '"gate_up_proj": ("w3", "w1")',
            "dsv4_jax/checkpoint/test_namings.py",
        ),
        (
            "weights_with_swapped_nibbles",
            "checkpoint/files.py",
            "np.stack([weight & 15, weight >> 4], axis=-1)",
            "np.stack([weight >> 4, weight & 15], axis=-1)",
            "dsv4_jax/checkpoint/test_number_formats.py",
        ),
        (
            "name_of_the_key_norm",
            "checkpoint/names.py",
            'r"\\.attn\\.kv_norm\\.", ".attn.norm."',
            'r"\\.attn\\.kv_norm\\.", ".attn.kv_norm."',
            "dsv4_jax/checkpoint/test_namings.py",
        ),
        (
            "config_swaps_its_ratios",
            "config/read_json.py",
            "(SWA, CSA, HCA), strict=True",
            "(SWA, HCA, CSA), strict=True",
            "dsv4_jax/config",
        ),
        (
            "draft_layer_has_a_layers_place",
            "config/layer_schedule.py",
            "family_idx=config.layer_types.count(AttentionType.SWA)",
            "family_idx=config.layer_types.count(AttentionType.SWA) - 1",
            "dsv4_jax/config",
        ),
    ),
    *_mutations(
        "pallas_kernels",
        (
            "e4m3_exponent",
            "common/numbers.py",
            "((127 - 7) << 3)",
            "((127 - 8) << 3)",
            "pallas_kernels/common/test_numbers.py",
        ),
        (
            "e2m1_ties_go_up",
            "common/numbers.py",
            "magnitude + 0x1FFFFF + ((magnitude >> 22) & 1)",
            "magnitude + 0x200000",
            "pallas_kernels/common/test_numbers.py",
        ),
        (
            "scale_rounded_down",
            "common/numbers.py",
            "jnp.int32) + 0x7FFFFF) >> 23",
            "jnp.int32)) >> 23",
            "pallas_kernels/common/test_numbers.py",
        ),
        (
            "windows_close_a_token_early",
            "common/call.py",
            "((self.positions + 1) % compression_ratio == 0)",
            "(self.positions % compression_ratio == 0)",
            "dsv4_jax/cache/test_flush.py dsv4_jax/cache/test_step_input.py",
        ),
        (
            "absent_entries_wrap",
            "common/addressing.py",
            "jnp.where(inside, blocks, -1)",
            "blocks",
            "pallas_kernels/gather_entries",
        ),
        (
            "inverse_rope_forwards",
            "common/norm_rope.py",
            "        sin = -sin\n",
            "        sin = +sin\n",
            "pallas_kernels/sparse_attention/test_sparse_attention.py "
            "dsv4_jax/model/test_against_transformers.py",
        ),
        (
            "ring_keeps_the_first_of_two",
            "append_tokens/reference.py",
            "[row] - size",
            "[row] - size - 1",
            "dsv4_jax/cache/test_handle.py",
        ),
        (
            "b_stream_one_token_short",
            "compressor/reference.py",
            "(back >= compression_ratio)",
            "(back > compression_ratio)",
            "pallas_kernels/compressor/test_pooling.py",
        ),
        (
            "entry_at_the_end_of_its_window",
            "compressor/reference.py",
            "begin, frequencies = position[:, compression_ratio], windows",
            "begin, frequencies = position[:, -1], windows",
            "pallas_kernels/compressor/test_pooling.py",
        ),
        (
            "nan_scores_rank_first",
            "select_top_k/reference.py",
            "jnp.where(jnp.isnan(scores), _NAN, ordered)",
            "ordered",
            "pallas_kernels/select_top_k pallas_kernels/index_topk",
        ),
        (
            "ties_go_to_the_higher_index",
            "select_top_k/reference.py",
            "best_keys, best = jax.lax.top_k(keys, k)",
            "best_keys, best = jax.lax.top_k(keys[..., ::-1], k); best = num_entries - 1 - best",
            "pallas_kernels/select_top_k pallas_kernels/index_topk",
        ),
        (
            "scores_without_relu",
            "index_scores/reference.py",
            "jax.nn.relu(jnp.matmul(keys, transposed, precision=highest))",
            "jnp.matmul(keys, transposed, precision=highest)",
            "pallas_kernels/index_topk",
        ),
        (
            "the_definition_of_scores_promotes_queries",
            "index_scores/reference.py",
            "transposed = queries.astype(jnp.float32).mT",
            "transposed = queries.mT",
            "pallas_kernels/index_topk/test_index_topk.py",
        ),
        (
            "no_sink",
            "sparse_attention/reference.py",
            "jnp.sum(weights, axis=-1) + jnp.exp(sink - largest)",
            "jnp.sum(weights, axis=-1)",
            "pallas_kernels/sparse_attention/test_sparse_attention.py",
        ),
        (
            "window_of_one_more",
            "gather_entries/reference.py",
            "valid = (position >= 0)",
            "valid = (position >= -1)",
            "pallas_kernels/gather_entries",
        ),
        (
            "sinkhorn_one_turn_short",
            "hyper_connections/reference.py",
            "jax.lax.fori_loop(0, iters - 1, ",
            "jax.lax.fori_loop(0, iters - 2, ",
            "pallas_kernels/hyper_connections",
        ),
        (
            "swiglu_clamps_one_side",
            "common/swiglu.py",
            "jnp.clip(up.astype(jnp.float32), -limit, limit)",
            "jnp.minimum(up.astype(jnp.float32), limit)",
            "pallas_kernels/expert_mlp",
        ),
        (
            "experts_lose_the_last_tile",
            "expert_mlp/worklist.py",
            "tiles_of = pl.cdiv(counts, tile_rows)",
            "tiles_of = jnp.maximum(counts // tile_rows, jnp.minimum(counts, 1))",
            "pallas_kernels/expert_mlp",
        ),
        (
            "kernel_of_blackwell_reads_products_before_they_are_there",
            "product/mosaic_blackwell.py",
            "plgpu.barrier_wait(work.scratch.accumulators_full.at[tmem_stage])",
            "None",
            "pallas_kernels/block_linear/test_block_linear_kernel.py",
        ),
        (
            "kernel_of_dense_experts_skips_a_group",
            "product/producer.py",
            "(group + g) * work.shapes.group_k, work.shapes.group_k)\n            source = rows",
            "group * work.shapes.group_k, work.shapes.group_k)\n            source = rows",
            "pallas_kernels/expert_mlp",
        ),
        (
            "fp8_scales_cross_blocks",
            "common/weights.py",
            "jnp.repeat(_scale_values(self.scale), FP8_BLOCK, axis=-2)",
            "jnp.repeat(_scale_values(self.scale[..., ::-1, :]), FP8_BLOCK, axis=-2)",
            "pallas_kernels/common/test_weights.py",
        ),
        (
            "activations_have_another_floor",
            "common/rows.py",
            "_AMAX_FLOOR = np.float32(1e-4)",
            "_AMAX_FLOOR = np.float32(1e-6)",
            "pallas_kernels/common/test_rows.py",
        ),
        (
            "hyper_connections_transposed",
            "write_streams/reference.py",
            "jnp.unstack(comb, axis=-2)",
            "jnp.unstack(comb, axis=-1)",
            "dsv4_jax/model/test_against_transformers.py",
        ),
        (
            "router_without_its_bias",
            "pick_experts/reference.py",
            "_best(scores + arguments.bias[None], ",
            "_best(scores, ",
            "dsv4_jax/model/test_moe.py pallas_kernels/pick_experts",
        ),
        (
            "router_breaks_ties_upwards",
            "pick_experts/reference.py",
            "earlier = (number[None, :] < number[:, None])[None]",
            "earlier = (number[None, :] > number[:, None])[None]",
            "dsv4_jax/model/test_moe.py pallas_kernels/pick_experts",
        ),
        (
            "a_device_counts_experts_from_the_wrong_one",
            "pick_experts/triton_gpu.py",
            "best - below",
            "best + below",
            "pallas_kernels/pick_experts",
        ),
        (
            "products_of_streams_lose_their_last_run",
            "gpu/triton_products.py",
            "jax.lax.fori_loop(0, of_part, add_run, zeros)",
            "jax.lax.fori_loop(0, of_part - 1, add_run, zeros)",
            "pallas_kernels/write_streams",
        ),
        (
            "a_pick_leaves_the_best_among_the_rest",
            "pick_experts/triton_gpu.py",
            "ranked = jnp.where(number == best, -jnp.inf, ranked)",
            "ranked = jnp.where(number == best, _LEAST, ranked)",
            "pallas_kernels/pick_experts",
        ),
        (
            "a_part_of_the_logits_is_not_added",
            "pick_experts/triton_gpu.py",
            "here = (part < parts) & exists[None]",
            "here = (part < max(1, parts - 1)) & exists[None]",
            "pallas_kernels/pick_experts",
        ),
        (
            "products_in_parts_with_two_parts_of_fn",
            "gpu/triton_products.py",
            "return (third + second) + first",
            "return second + first",
            "pallas_kernels/write_streams",
        ),
        (
            "counting_gives_a_row_twice",
            "expert_mlp/triton_counting.py",
            "return before + jnp.sum(ones)",
            "return before",
            "pallas_kernels/expert_mlp/test_worklist_kernel.py",
        ),
        (
            "scores_of_a_neighbour_by_the_keys_of_another_request",
            "index_scores/score_tiles.py",
            "pl.when(cta.segments[i] == keys.segment)(store)",
            "pl.when(keys.segment >= 0)(store)",
            "pallas_kernels/index_scores",
        ),
        (
            "neighbours_of_another_request_take_no_pass",
            "index_scores/key_pipeline.py",
            "is_first = is_first & ~same if i < number else is_first",
            "is_first = is_first & (i >= number)",
            "pallas_kernels/index_scores",
        ),
        (
            "a_neighbour_sees_as_much_as_the_first_token",
            "index_scores/key_pipeline.py",
            "num_visible = jnp.maximum(num_visible, seen)",
            "num_visible = jnp.maximum(num_visible, seen) if i <= number else num_visible",
            "pallas_kernels/index_scores",
        ),
        (
            "tokens_of_many_requests_share_keys",
            "index_scores/tiling.py",
            "max(_MANY_TOKENS, _TOKENS_OF_REQUEST * num_requests)",
            "_MANY_TOKENS",
            "pallas_kernels/index_scores",
        ),
        (
            "picked_rows_take_the_scales_of_those_in_their_place",
            "product/triton_rows.py",
            "(term, group, source[None])",
            "(term, group, row[None])",
            "pallas_kernels/product/test_pick_rows.py",
        ),
        (
            "a_program_that_picks_begins_with_the_wrong_word",
            "product/triton_rows.py",
            "word = start * _WORDS + jnp.arange(_PICKED_GROUPS",
            "word = start + jnp.arange(_PICKED_GROUPS",
            "pallas_kernels/product/test_pick_rows.py",
        ),
        (
            "groups_of_a_row_that_is_rounded_are_the_first_one",
            "product/round_rows.py",
            "first = column + group * INPUTS",
            "first = column",
            "pallas_kernels/product/test_round_rows.py",
        ),
        (
            "scales_of_two_rows_lie_where_one_row_s_do",
            "product/round_rows.py",
            "target[...] = scale.reshape(rows, groups).T",
            "target[...] = scale.reshape(groups, rows)",
            "pallas_kernels/product/test_round_rows.py",
        ),
        (
            "the_last_groups_of_a_row_are_not_rounded",
            "product/round_rows.py",
            "units = pl.cdiv(k_groups, 2 * groups)",
            "units = k_groups // (2 * groups)",
            "pallas_kernels/product/test_round_rows.py",
        ),
        (
            "a_loop_that_rounds_rows_ends_early",
            "product/round_rows.py",
            "lax.fori_loop(0, rounds,",
            "lax.fori_loop(0, rounds - 1,",
            "pallas_kernels/product/test_round_rows.py",
        ),
        (
            "tiles_of_few_rows_are_one_too_few",
            "product/choose_tiling.py",
            "few = pl.cdiv(num_rows, most_items * least) * least",
            "few = num_rows // (most_items * least) * least or least",
            "pallas_kernels/product/test_choose_tiling.py",
        ),
        (
            "inputs_of_half_of_a_gate_are_not_split",
            "product/choose_tiling.py",
            "_MOST_READERS = 4",
            "_MOST_READERS = 8",
            "pallas_kernels/product/test_choose_tiling.py",
        ),
        (
            "experts_that_two_tokens_picked_have_one_row",
            "expert_mlp/mosaic_gpu.py",
            "most=x.shape[0])",
            "most=1)",
            "pallas_kernels/expert_mlp/test_expert_mlp_kernel.py",
        ),
        (
            "the_shared_expert_takes_rows_in_the_order_of_mxfp4",
            "expert_mlp/mosaic_gpu.py",
            "if not (isinstance(gate, BlockFP8) and isinstance(w1, BlockFP8)):",
            "if not isinstance(gate, BlockFP8):",
            "pallas_kernels/expert_mlp/test_rounded_once.py",
        ),
        (
            "experts_elsewhere_count_where_rows_are_rounded_once",
            "expert_mlp/mosaic_gpu.py",
            "num_pairs * w1.shape[0] // (arguments.picked_among or w1.shape[0])",
            "num_pairs",
            "pallas_kernels/expert_mlp/test_rounded_once.py",
        ),
        (
            "the_collapsed_row_of_many_is_weighed_as_post",
            "hyper_connections/triton_gpu.py",
            "jax.nn.sigmoid(read.logits[:, :num])",
            "jax.nn.sigmoid(read.logits[:, num : 2 * num])",
            "pallas_kernels/hyper_connections",
        ),
        (
            "experts_of_many_rows_are_not_unpacked",
            "expert_mlp/mosaic_gpu.py",
            "mean < UNPACKED_ROWS or",
            "True or",
            "pallas_kernels/expert_mlp/test_expert_mlp_kernel.py",
        ),
        (
            "the_last_tile_that_was_loaded_ahead_multiplies_earlier_rows",
            "product/mosaic_hopper.py",
            "_add_group(work, last, 0, accumulators, None, operand)",
            "_add_group(work, last - 1, 0, accumulators, None, operand)",
            "pallas_kernels/block_linear/test_block_linear_kernel.py",
        ),
        (
            "kernel_hyper_connections_leave_out_half_of_a_sum",
            "hyper_connections/triton_gpu.py",
            "_sum_of_pairs(terms[:half]) + _sum_of_pairs(terms[half:])",
            "_sum_of_pairs(terms[:half]) + _sum_of_pairs(terms[:half])",
            "pallas_kernels/hyper_connections",
        ),
        (
            "the_upper_four_codes_have_the_signs_of_the_lower",
            "expert_mlp/triton_unpack.py",
            "(16, words << 4)",
            "(16, words)",
            "pallas_kernels/expert_mlp/test_triton_unpack.py",
        ),
        (
            "a_block_s_scale_is_that_of_its_first_tile",
            "expert_mlp/triton_unpack.py",
            "jnp.max(unpack_mxfp4.largest_scale(of_row))",
            "jnp.max(jnp.where(row < ROWS, unpack_mxfp4.largest_scale(of_row), 0))",
            "pallas_kernels/expert_mlp/test_triton_unpack.py",
        ),
        (
            "kernel_norms_queries_by_half_of_their_columns",
            "sparse_attention/mosaic_hopper.py",
            "return squares + plgpu.load(theirs, layout=mosaic.ROW, optimized=False)",
            "return squares + squares",
            "pallas_kernels/sparse_attention/test_sparse_attention_kernels.py",
        ),
        (
            "kernel_of_few_tokens_sees_a_window_that_is_too_long",
            "sparse_attention/triton_few.py",
            "position = newest - (window - 1) + place",
            "position = newest - window + place",
            "pallas_kernels/sparse_attention/test_few_tokens.py",
        ),
        (
            "kernel_of_few_tokens_looks_beyond_what_is_visible",
            "sparse_attention/triton_few.py",
            "wanted &= place < refs.visible[token]",
            "wanted &= place < refs.visible[token] + 999",
            "pallas_kernels/sparse_attention/test_few_tokens.py",
        ),
        (
            "scales_of_an_entry_s_second_word_are_those_of_the_first",
            "gpu/triton_entries.py",
            'word = jnp.broadcast_to(_read_word(sources, "scale", n)[:, None], shape)',
            'word = jnp.broadcast_to(_read_word(sources, "scale", 0)[:, None], shape)',
            "pallas_kernels/sparse_attention/test_few_tokens.py pallas_kernels/gather_entries",
        ),
        (
            "a_launch_takes_rows_by_token_group_by_group",
            "product/triton_rows.py",
            "if source.interleaved > 1:",
            "if source.interleaved > 99:",
            "pallas_kernels/block_linear/test_by_token.py",
        ),
        (
            "columns_of_a_group_are_those_of_the_first",
            "product/triton_rows.py",
            "lane // width * (count // source.column_runs) + row",
            "row",
            "pallas_kernels/block_linear/test_by_token.py",
        ),
        (
            "a_launch_leaves_sums_unrounded",
            "product/triton_rows.py",
            "triton.round_to_bf16(total) if source.dtype == jnp.bfloat16 else total",
            "total",
            "pallas_kernels/block_linear/test_by_token.py",
        ),
        (
            "kernel_rotates_queries_backwards",
            "sparse_attention/loads.py",
            "rotate(rows.astype(jnp.float32), angles)",
            "rotate(rows.astype(jnp.float32), angles, inverse=True)",
            "pallas_kernels/sparse_attention/test_sparse_attention_kernels.py",
        ),
        (
            "kernel_rotates_its_output_forwards",
            "sparse_attention/rope.py",
            "rotate(values, angles, inverse=True)",
            "rotate(values, angles)",
            "pallas_kernels/sparse_attention/test_sparse_attention_kernels.py",
        ),
        (
            "a_part_of_a_result_is_lost",
            "expert_mlp/mosaic_gpu.py",
            "SplitSums(down[0, :picks, None], x.dtype)",
            "SplitSums(down[0, 1:picks, None], x.dtype)",
            "pallas_kernels/expert_mlp/test_expert_mlp_kernel.py",
        ),
        (
            "kernel_write_streams_transposed",
            "write_streams/triton_gpu.py",
            "comb[token, jnp.int32(j), k]",
            "comb[token, k, jnp.int32(j)]",
            "pallas_kernels/write_streams",
        ),
        (
            "kernel_write_many_streams_transposed",
            "write_streams/triton_many.py",
            "comb[token, jnp.int32(j), jnp.int32(k)]",
            "comb[token, jnp.int32(k), jnp.int32(j)]",
            "pallas_kernels/write_streams",
        ),
        (
            "products_of_streams_with_two_parts_of_fn",
            "write_streams/triton_many.py",
            "rest = rest - terms[-1]",
            "rest = (rest - terms[-1]) * (len(terms) < 2)",
            "pallas_kernels/write_streams",
        ),
        (
            "kernel_hyper_connections_post",
            "hyper_connections/triton_gpu.py",
            "(token, lane), 2 * jax.nn.sigmoid(",
            "(token, lane), jax.nn.sigmoid(",
            "pallas_kernels/hyper_connections",
        ),
        (
            "kernel_hyper_connections_of_many_take_the_next_logit",
            "hyper_connections/triton_gpu.py",
            "logit((2 + j) * num + k)",
            "logit((1 + j) * num + k)",
            "pallas_kernels/hyper_connections",
        ),
        (
            "kernel_hyper_connections_of_many_take_one_factor_for_post_and_comb",
            "hyper_connections/triton_gpu.py",
            "jnp.minimum(number // num, 2)",
            "jnp.minimum(number // num, 1)",
            "pallas_kernels/hyper_connections",
        ),
        (
            "experts_tiles_leave_no_register_for_pieces",
            "product/choose_tiling.py",
            "most = min(_WIDE, (_ROWS_IN_REGISTERS - tile_m) // 2)",
            "most = _WIDE",
            "pallas_kernels/product/test_choose_tiling.py",
        ),
        (
            "fp8_experts_take_narrow_tiles",
            "expert_mlp/mosaic_gpu.py",
            "shares_items=True",
            "shares_items=False",
            "pallas_kernels/expert_mlp/test_expert_mlp_kernel.py",
        ),
        (
            "products_take_narrow_tiles_of_long_rows",
            "product/choose_tiling.py",
            "if short and (split_k == 1 or num_rows <= tile_m)",
            "if split_k == 1 or num_rows <= tile_m",
            "pallas_kernels/product/test_choose_tiling.py",
        ),
        (
            "a_tile_for_each_sm_takes_few_stages",
            "product/choose_tiling.py",
            "tile_m == _WIDE and num_tiles > shapes.core.device.num_sms",
            "tile_m == _WIDE",
            "pallas_kernels/product/test_choose_tiling.py",
        ),
        (
            "rows_on_the_left_are_all_stored",
            "product/mosaic_hopper_rows.py",
            "work.tile.num_rows - first",
            "work.tile.num_rows",
            "pallas_kernels/block_linear/test_block_linear_kernel.py",
        ),
        (
            "rows_on_the_left_take_one_tile_s_scale",
            "product/mosaic_hopper_rows.py",
            "[work.scale_of_tile(tile, group) for tile",
            "[work.scale_of_tile(0, group) for tile",
            "pallas_kernels/block_linear/test_block_linear_kernel.py",
        ),
        (
            "rows_that_share_a_scale_take_the_first_one_s",
            "gpu/unpack_mxfp4.py",
            "jnp.tile(jnp.max(largest_scale(words).reshape(2, -1), axis=0), 2)",
            "jnp.tile(largest_scale(words)[:32], 2)",
            "pallas_kernels/block_linear/test_block_linear_kernel.py",
        ),
        (
            "many_rows_are_never_rounded",
            "product/decoded.py",
            'or weight.activations == "fp8"',
            "",
            "pallas_kernels/block_linear/test_block_linear_kernel.py",
        ),
        (
            "many_rows_are_others",
            "product/triton_rows.py",
            "first, program = pl.program_id(0) * height,",
            "first, program = pl.program_id(0),",
            "pallas_kernels/block_linear/test_block_linear_kernel.py",
        ),
        (
            "rows_that_nobody_reads_are_rounded",
            "product/triton_rows.py",
            "pl.when(first < num_used[0])(run)",
            "run()",
            "pallas_kernels/block_linear/test_block_linear_kernel.py",
        ),
        (
            "rows_of_the_last_tile_are_not_rounded",
            "expert_mlp/mosaic_gpu.py",
            "jnp.where(num_rows > 0, first + num_rows, 0)",
            "jnp.where(num_rows > 0, first, 0)",
            "pallas_kernels/expert_mlp/test_expert_mlp_kernel.py",
        ),
        (
            "kernel_gather_window_age",
            "gather_entries/triton_gpu.py",
            "- place + window, window)",
            "- place + window - 1, window)",
            "pallas_kernels/gather_entries",
        ),
        (
            "kernel_selection_takes_all_of_a_digit",
            "select_top_k/radix_steps.py",
            "all_taken = left == counts[digit]",
            "all_taken = left <= counts[digit]",
            "pallas_kernels/select_top_k",
        ),
        (
            "kernel_attention_decays_nothing",
            "sparse_attention/mosaic_hopper.py",
            "jnp.exp2(state.largest - largest)",
            "jnp.exp2(0 * (state.largest - largest))",
            "pallas_kernels/sparse_attention",
        ),
    ),
]


def apply(mutation: Mutation, root: pathlib.Path) -> None:
    """Makes the edit in a copy of the tree.

    Raises:
      ValueError: the old text does not occur exactly once.
    """
    file = root / mutation.file
    text = file.read_text()
    if text.count(mutation.old) != 1:
        raise ValueError(f"{mutation.name}: {mutation.file} must hold {mutation.old!r} once")
    file.write_text(text.replace(mutation.old, mutation.new))


def judge(mutation: Mutation) -> tuple[bool, str]:
    """Runs the tests on a mutated copy: whether it is caught, and by which test or why not."""
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder) / "tree"
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
        apply(mutation, root)
        caught, why = _run_tests(root, mutation.tests, "not bench and not slow")
        if not caught and why in (ALL_PASSED, NONE_CHOSEN):
            caught, why = _run_tests(root, mutation.tests, "not bench and slow")
    return caught, why


def _run_tests(root: pathlib.Path, tests: tuple[str, ...], markers: str) -> tuple[bool, str]:
    """Whether one of these tests fails in that tree, and which, or what came out instead."""
    paths = os.pathsep.join([str(root), str(root / "tests")])
    files = [str(root / "tests" / test) for test in tests]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-m",
            markers,
            *files,
        ],
        cwd=root,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    if done.returncode == pytest.ExitCode.TESTS_FAILED and failed:
        return True, failed[1]
    verdicts = {pytest.ExitCode.OK: ALL_PASSED, pytest.ExitCode.NO_TESTS_COLLECTED: NONE_CHOSEN}
    said = f"no verdict: {(done.stdout + done.stderr).strip()[-500:]}"
    return False, verdicts.get(done.returncode, said)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", metavar="NAME", help="names, or how they begin")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    begin = tuple(arguments.only or [""])
    chosen = [mutation for mutation in MUTATIONS if mutation.name.startswith(begin)]
    if not chosen:
        parser.error(f"no such mutation: {', '.join(begin)}")
    if arguments.list:
        for mutation in chosen:
            print(f"{mutation.name:40}{mutation.file:46}{' '.join(mutation.tests)}")
        return 0
    survivors = 0
    for mutation in chosen:
        start = time.perf_counter()
        caught, why = judge(mutation)
        survivors += not caught
        seconds = time.perf_counter() - start
        print(f"{'caught' if caught else 'SURVIVED':9}{mutation.name:40}{seconds:5.0f} s  {why}")
        sys.stdout.flush()
    print(f"{len(chosen) - survivors} of {len(chosen)} caught")
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
