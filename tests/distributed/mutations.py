"""Faults put into the product on purpose, to show that the checks would find them."""
