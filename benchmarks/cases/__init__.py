"""Shapes of calls, a file for each kind of op: benchmarks time them, and `tools.aot` compiles them.

    product                matrices of the models, and rows that are multiplied with them
    expert_mlp             experts of the models, and tokens that pick among them
    sparse_attention       heads, entries and tokens
    selection              requests, and entries that are scored and selected
    hyper_connections      tokens whose streams are read and written
    cache                  tokens and entries that are kept, gathered and moved
    tokens                 rows that are projected, sent to experts, and from which tokens are drawn
    collectives            rows that devices of a mesh add up and exchange
    lowerings              calls of Triton kernels that are timed by each lowering

What is timed is a product of lists such as `MATRICES` and `ROWS`. What is compiled are single calls
in lists that begin with `COMPILED`, since a compiler takes seconds for each. Sizes are those of a
model wherever one has them. Recorded figures and published tables have names that are made of these
numbers, so that another number is another row. Calls of `tools.product_calls` are small, of no
model, and stand there.
"""
