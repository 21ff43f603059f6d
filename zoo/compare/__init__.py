"""Comparing architectures: equal budgets, runs that share everything else, and what may be concluded from them."""
