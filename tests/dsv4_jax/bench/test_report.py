"""What benchmarks print of a case: times with their spread, and what it took to compile."""

from dsv4_jax.bench import report, round_report

COMPILED = {"trace_s": 1.26, "compile_s": 2.5, "launches": {"total": 1234, "ours": 56}}
ROUND = {"batch": 1, "context": 8192, "draft_tokens": 5}


def test_a_decode_step():
    row = COMPILED | {
        "batch": 8,
        "context": 4096,
        "step_ms": 4.9804,
        "step_ms_least": 4.95,
        "step_ms_most": 5.0,
        "tokens_per_s": 1606.3,
        "copy_share": 0.514,
        "cache_part_trace_s": 0.4,
        "cache_part_compile_s": 0.5,
        "loop_ms": 4.7,
        "loop_ms_least": 4.6,
        "loop_ms_most": 4.8,
        "loop_steps": 16,
    }
    assert report.decode_line(row) == (
        "batch 8, context 4,096: compiled in 3.8 s, 1,234 launches, "
        "4.980 ms (4.950 to 5.000), 1,606 tokens/s, 51% of the copy bandwidth, "
        "cache part compiled in 0.9 s, 4.700 ms (4.600 to 4.800) a token in a loop of 16"
    )
    uniform = {"routing": "uniform", "experts_read": 43.1}
    row["by_routing"] = {"uniform": uniform, "zipf": uniform | {"routing": "zipf", "step_ms": 4.2}}
    rest = "(4.950 to 5.000), 1,606 tokens/s, 51% of the copy bandwidth, 43.1 experts of a layer, "
    assert f"uniform routing 4.980 ms {rest}zipf routing 4.200 ms {rest}" in report.decode_line(row)
    heading, *lines, _, _ = [*report.decode_table([row]).splitlines(), "", ""]
    assert heading.split()[:4] == ["batch", "context", "routing", "experts"]
    assert [line.split()[2:4] for line in lines] == [["uniform", "43.1"], ["zipf", "43.1"]]
    for each in row["by_routing"].values():  # as of a mesh
        each["expected_experts"] = each.pop("experts_read") + 1
    _, *lines = report.decode_table([row]).splitlines()
    assert [line.split()[3] for line in lines] == ["~44.1", "~44.1"]


def test_a_prompt():
    row = COMPILED | {"tokens": 32768, "chunk_tokens": 8192}
    assert report.prefill_line(row) == "32,768 tokens in calls of 8,192: compiled in 3.8 s"
    row |= {
        "prefill_s": 1.4812,
        "tokens_per_s": 22125.0,
        "matrix_share": 0.4,
        "fp8_share": 0.2,
        "temp_bytes": 2**31,
        "weight_bytes_read": {"FP8": 1.5e9},
        "expected_experts": 192.0,
    }
    read = "reads weights of FP8 1.50 GB, 192.0 experts of each layer among them"
    beside = "; 2.00 GiB beside weights and cache, compiled in 3.8 s"
    rate = "22,125 tokens/s, 40% of the bf16 matrix rate (20% of that of FP8)"
    assert report.prefill_line(row).endswith(f": 1.481 s, {rate}, {read}{beside}")
    row["by_routing"] = {
        "uniform": {"routing": "uniform"},
        "zipf": {"routing": "zipf", "prefill_s": 1.5, "expected_experts": 190.0},
    }
    assert report.prefill_line(row).endswith(
        f": uniform routing 1.481 s, {rate}, {read} by uniform routing; "
        f"zipf routing 1.500 s, {rate}, {read.replace('192', '190')} by zipf routing{beside}"
    )


def test_a_part_of_a_round():
    times = {"ms": 4.8801, "ms_least": 4.85, "ms_most": 4.9}
    sizes = {"temp_bytes": 2**20, "alias_bytes": 3 * 2**20}
    found = {"plain": {"ms": 4.0}, "round": times | COMPILED | sizes}
    assert round_report.part_line(ROUND | {"parts": found}, "round").endswith(
        ": 4.880 ms (4.850 to 4.900), 1,234 launches, 56 ours, 1.0 MiB beside, 3.0 in place, "
        "compiled in 3.8 s, 1.220 of a plain step"
    )
    assert round_report.part_line(ROUND | {"parts": found}, "plain").endswith(": 4.000 ms")
    floor = {"floor_ms": 4.0, "floor_share": 0.8, "tokens_a_round": 3.9, "as_taught": 1.0}
    assert round_report.kept_line(ROUND | {"kept": {3: times | floor}}, 3) == (
        "1 request of 8,192 tokens, 5 drafts, taught to keep 3: 4.880 ms (4.850 to 4.900), "
        "floor 4.000 ms, 80% of its bandwidth, 3.90 tokens a round, 100.0% as taught"
    )
