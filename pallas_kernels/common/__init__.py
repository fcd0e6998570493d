"""What every op shares: codecs, formats, rounding, addressing, checks.

    call, layer_planes          where a call's tokens belong; one layer of a stacked family
    formats, codecs, numbers    cache formats, the codecs that they are made of, element types
    pages                       published page bytes
    weights, rows               block FP8 and MXFP4, and the rows that multiply them
    pending, shaped             results that the next kernel finishes
    norm_rope, swiglu           elementwise maths
    rounding, addressing        roundings that XLA would change; index arithmetic
    backend                     which implementation runs
    checks, check_weights       of arguments

`chunks` runs a function on some tokens at a time.
"""
