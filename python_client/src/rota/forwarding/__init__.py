"""Carry jobs between databases: `forwarder` finds what is to go, and `carrier` carries it."""
