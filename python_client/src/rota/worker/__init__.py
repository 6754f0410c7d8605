"""The worker: claim jobs, run their handlers, report how they ended."""
