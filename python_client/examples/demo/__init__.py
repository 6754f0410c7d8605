"""The demo: a small shop's background jobs on real processes, one of which is killed.

`handlers` is the part to learn from: the shop's jobs, safe to run twice.
"""
