"""The version of this package; the same as that of the SQL it carries."""

__version__ = "0.2.0"
