"""Steps, sampling, and the host loop that drives them."""
