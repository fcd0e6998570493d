"""The three attention types, on the cache and over whole sequences."""
