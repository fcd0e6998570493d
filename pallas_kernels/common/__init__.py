"""What every op shares: codecs, formats, rounding, addressing, checks."""
