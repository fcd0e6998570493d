"""What grammars of answers are made of: their lines, calls of tools, and texts as values."""
