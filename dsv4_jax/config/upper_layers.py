"""The layers above the last one that makes entries, which a prompt needs for its last tokens alone.

They read entries of that layer, which depend on what it reads of a token and on nothing above it.
What else goes from token to token there are windows: a layer's output at position p depends on the
W positions up to p of its own input. So n layers reach back n (W - 1) positions.

    W = 3, n = 2        layer 1      . . o o o o x       x is exact, and so are all o
                        layer 0      o o o o o o o       R = W + (n - 1) (W - 1) = 5

Source: deepseek_v41.md section 12.
"""

from __future__ import annotations

import dataclasses

from dsv4_jax.config.model_config import DSV4Config

UPPER_SHARE = 16
"""Of the tokens of a step in which some rest, one of so many may be of prompts that do not."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpperLayers:
    """Which layers they are, and for how many tokens they have to run.

    Attributes:
      first: the last layer that makes entries; it makes them of all tokens, and attends and all
        that follows runs for some.
      look_back: R, the tokens before a position for which they have to run, so that what later
        tokens read of them there is exact: the last W rows of every ring, those of the draft among
        them, and the streams of the last token.
    """

    first: int
    look_back: int


def upper_layers(config: DSV4Config) -> UpperLayers | None:
    """The layers that may be left out for most tokens of a prompt; None if all are needed.

    All are where each layer makes entries of its own, as in V4, and where no layer makes any.

        R = W + d (W - 1)

    The last layer's ring has W rows, which depend on the d = n - 1 upper layers before it. Target
    layers of a DSpark draft give it their input, or their output where streams are not shifted, and
    an MTP block reads the streams after all n.
    """
    if config.sources is None or not config.sources.makers:
        return None
    first, window = config.sources.makers[-1], config.sliding_window
    deepest = config.num_layers - 1
    if config.num_mtp_layers:
        deepest = config.num_layers
    if config.dspark is not None:
        after = 0 if config.shifted_streams else 1
        targets = (min(target + after, config.num_layers) for target in config.dspark.target_layers)
        deepest = max(deepest, *targets)
    return UpperLayers(first=first, look_back=window + (deepest - first) * (window - 1))


def upper_size(size: int, decoding: int) -> int:
    """U, the tokens that upper layers run in a step of a size in which they rest for the others.

    Args:
      size: T, tokens of the step.
      decoding: tokens of requests that decode.

    Returns:
      A multiple of eight; 0 where less than half of the step could rest, which has no such program.
    """
    wanted = -(-(decoding + size // UPPER_SHARE) // 8) * 8
    return wanted if 2 * wanted <= size else 0
