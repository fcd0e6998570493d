"""A closed window into one entry: the definition, and its form in a kernel."""
