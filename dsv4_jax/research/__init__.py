"""Ideas: what they are made of, and what they change in loss, speed, memory and answers."""

from dsv4_jax.attention.pooling import Pooling, WindowTokens
from dsv4_jax.attention.selection import Selection, Selector, select_by_score, visible_entries
from dsv4_jax.config.idea import Idea
from dsv4_jax.research.intervals import Interval, mean_interval, paired_difference
from dsv4_jax.research.losses import losses_by_row
from dsv4_jax.research.named import find_idea
from dsv4_jax.research.speed import DecodeCost, time_decode
from dsv4_jax.training.corpus import held_out_rows, read_held_out
from dsv4_jax.training.losses import select_all, select_at_random

__all__ = [
    "DecodeCost",
    "Idea",
    "Interval",
    "Pooling",
    "Selection",
    "Selector",
    "WindowTokens",
    "find_idea",
    "held_out_rows",
    "losses_by_row",
    "mean_interval",
    "paired_difference",
    "read_held_out",
    "select_all",
    "select_at_random",
    "select_by_score",
    "time_decode",
    "visible_entries",
]
