"""Turns of a conversation, as clients give them back, in the form that the library renders."""
