"""Forward passes over the rows of a batch: rows packed behind each other, attention inside each row, outputs read by a head.

The rows of a micro-batch become one sequence [1, N] (packing.py). Attention is the only part of a transformer that mixes positions, and it
stays inside a row (attention.py): everything else needs no change. A head (output_layers.py) turns the last hidden states into log-probs of
a language model, values of a critic or scores of a reward model (outputs.py). passes.py puts them together.
"""

from __future__ import annotations

from rollouts._lazy import attach_stub

__getattr__, __dir__ = attach_stub(__name__, __file__)
