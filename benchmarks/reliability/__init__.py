"""Experiments that try to lose, repeat or let in what a run must not: each with a bar, a figure, and a naive variant that must fail."""
