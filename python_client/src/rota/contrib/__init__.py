"""What works with other packages, each with an extra of its own."""
