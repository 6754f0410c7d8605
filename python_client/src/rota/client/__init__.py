"""The client: the stored functions as methods, over a connection of the caller."""
