"""Search over the records of a topic: a small language, compiled by us, in a process of its own."""
