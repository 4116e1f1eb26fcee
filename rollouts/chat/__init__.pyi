"""The public names of this package: the only list of them, for editors, type checkers and, by rollouts/_lazy.py, at run time."""

from .char_tokenizer import create_char_tokenizer as create_char_tokenizer
from .tokenize import (
    prepare_sft_sample as prepare_sft_sample,
    tokenize_conversation as tokenize_conversation,
)
