"""The tables of the shop, and rota."""
