"""The three attention types, on the cache and over whole sequences.

    swa, csa, hca    a sublayer on the cache: project, append, select, attend, project
    projections      its products with weights, those of compressors and indexer too
    compressor       what compressors take of a token; entries of whole sequences
    indexer          index queries
    selection        which entries a query attends to
    block_attention  the sublayer of a DSpark stage
    full_sequence    the three types without a cache, for training and for checking

`pooling` is where an idea changes what tokens bring into their windows, `rope` has the two tables,
and `params` the parameters.
"""

from dsv4_jax.attention.pooling import Pooling, WindowTokens
from dsv4_jax.attention.selection import Selection, Selector, select_by_score

__all__ = ["Pooling", "Selection", "Selector", "WindowTokens", "select_by_score"]
