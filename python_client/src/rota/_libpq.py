"""Load psycopg first, and say in one line what to do where it finds no libpq."""

try:
    import psycopg as psycopg
except ModuleNotFoundError:
    raise
except ImportError as error:
    problem = str(error).partition("\n")[0].rstrip(".")
    hint = "pip install './python_client[binary]' installs one with its libpq"
    raise ImportError(f"psycopg cannot be loaded, {problem}: {hint}") from None
