"""How the shipped checkpoint was made, and text to measure it on; inference needs none of it."""
