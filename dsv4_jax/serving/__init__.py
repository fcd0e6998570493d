"""The engine: requests come and go, and steps serve them."""
