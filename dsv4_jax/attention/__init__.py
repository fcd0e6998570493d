"""The three attention types, on the cache and over a whole history."""
