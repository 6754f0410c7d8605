"""What manage.py finds."""
