"""What `bench decode --drafts` prints."""

from __future__ import annotations

from typing import Any

from dsv4_jax.bench.report import compiled, table_lines, timed
from dsv4_jax.bench.round_programs import PARTS


def floor_lines(row: dict[str, Any]) -> list[str]:
    """What a plain step and a round must read."""
    sizes = {name: f"{count / 1e9:.3f}" for name, count in row["bytes"].items()}
    experts = ", ".join(f"{n} rows {e:.1f}" for n, e in row["expected_experts"].items())
    each = " on each device" if "data" in row else ""
    return [
        f"{_where(row)}: a plain step reads {sizes['plain']} GB{each}; a round {sizes['round']}: "
        f"rows {sizes['verify']}, context {sizes['context']}, pass {sizes['block_pass']}, chain "
        f"{sizes['chain']}",
        f"{_where(row)}: experts of a layer that independent picks read: {experts}",
    ]


def part_line(row: dict[str, Any], part: str) -> str:
    """One part of a case as a line of text, as far as it is known."""
    found, words = row["parts"][part], [f"{_where(row)}, {PARTS[part]}:"]
    if "failed" in found:
        return f"{words[0]} failed, {found['failed']}"
    if "ms" in found:
        words.append(f"{timed(found)},")
    if "floor_ms" in found:
        words.append(_floor(found))
    if "tokens_a_round" in found:
        words.append(f"{found['tokens_a_round']:.2f} tokens a round,")
    if "launches" in found:
        launches = found["launches"]
        words.append(
            f"{launches['total']:,} launches, {launches['ours']:,} ours, "
            f"{found['temp_bytes'] / 2**20:,.1f} MiB beside, "
            f"{found['alias_bytes'] / 2**20:,.1f} in place, {compiled(found)},"
        )
    plain = row["parts"].get("plain", {}).get("ms")
    if plain and part != "plain" and "ms" in found:
        words.append(f"{found['ms'] / plain:.3f} of a plain step,")
    return " ".join(words).rstrip(",")


def turns_line(row: dict[str, Any], part: str) -> str:
    """What a part takes beside a plain step, measured in turns."""
    found = row["beside_plain"][part]
    return (
        f"{_where(row)}, {PARTS[part]}, in turns with a plain step: {found['median']:.3f} of it "
        f"({found['least']:.3f} to {found['most']:.3f} in {found['pairs']} pairs)"
    )


def kept_line(row: dict[str, Any], kept: int) -> str:
    """Rounds that were taught to keep so many drafts."""
    found = row["kept"][kept]
    return (
        f"{_where(row)}, taught to keep {kept}: {timed(found)}, {_floor(found)} "
        f"{found['tokens_a_round']:.2f} tokens a round, "
        f"{found['as_taught']:.1%} as taught"
    )


def _floor(found: dict[str, Any]) -> str:
    if "collectives" in found:
        return (
            f"floor {found['floor_ms']:.3f} ms, {found['floor_collectives_ms']:.3f} of them "
            f"{found['collectives']} collectives, {found['floor_share']:.0%} of the time,"
        )
    text = f"floor {found['floor_ms']:.3f} ms, {found['floor_share']:.0%} of its bandwidth,"
    if "experts_read" in found:
        text += (
            f" {found['experts_read']:.1f} experts of a layer read: floor "
            f"{found['read_floor_ms']:.3f} ms, {found['read_floor_share']:.0%},"
        )
    return text


def token_table(rows: list[dict[str, Any]]) -> str:
    """Tokens a second by tokens a round, of all cases."""
    flat = [row | each for row in rows for each in row.get("tokens_per_s", [])]
    if not flat:
        return ""
    columns = {
        "requests": lambda r: f"{r['batch']}",
        "tokens a round": lambda r: f"{r['tokens_a_round']:.1f}",
        "ms a round": lambda r: f"{r['round_ms']:.3f}",
        "ms a token": lambda r: f"{r['ms_a_token']:.3f}",
        "tokens/s": lambda r: f"{r['tokens_per_s']:,.0f}",
        "of plain steps": lambda r: f"{r['of_plain']:.2f}",
        "with random tokens": lambda r: f"{r['of_plain_at_random']:.2f}",
    }
    return "\n".join(table_lines(columns, flat))


def _where(row: dict[str, Any]) -> str:
    requests = "1 request" if row["batch"] == 1 else f"{row['batch']} requests"
    mesh = f" on {row['data']}x{row['model']}" if "data" in row else ""
    return f"{requests} of {row['context']:,} tokens, {row['draft_tokens']} drafts{mesh}"
