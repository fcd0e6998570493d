"""How the shipped checkpoint was made, and how it is measured; inference needs none of it."""
