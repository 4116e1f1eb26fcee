"""Tokenizer with one token per character, for small models trained from scratch. Needs no download."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


PAD_TOKEN, EOS_TOKEN, UNK_TOKEN = "<|pad|>", "<|eos|>", "<|unk|>"  # ids 0, 1, 2

ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz+-*/=?.,: \n()<>[]{}_!;'\"#%ABCDEFGHIJKLMNOPQRSTUVWXYZ$&@\\^`|~\t"
"""Characters in the order of their ids, from id 3 on. The first 61 make the vocabulary of 64; all 97 are printable ASCII,
newline and tab."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "assistant: {% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}"
    "{{ message['role'] }}: {{ message['content'] }}{{ '\\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Plain "role: content" lines; an assistant message ends with the end-of-text token, which the model must produce itself."""


def create_char_tokenizer(vocab_size: int = 64) -> PreTrainedTokenizerFast:
    """Build the character tokenizer: pad id 0, eos id 1, unk id 2, then one id per character of ALPHABET.

    Encoding adds no special token and decoding inserts nothing, so decode(encode(text)) == text for text over the vocabulary.

    Args:
        vocab_size: number of ids, special ones included; 4 <= vocab_size <= 3 + len(ALPHABET). 64 covers digits, lower-case letters,
            arithmetic signs, common punctuation, space and newline; 99 covers all of printable ASCII. Other characters become unk.

    Returns: a tokenizer that save_pretrained writes and AutoTokenizer.from_pretrained opens again.
    """
    assert 4 <= vocab_size <= 3 + len(ALPHABET), f"vocab_size is {vocab_size}, expected between 4 and {3 + len(ALPHABET)}"
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    entries = [PAD_TOKEN, EOS_TOKEN, UNK_TOKEN, *ALPHABET[: vocab_size - 3]]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(entries)}, unk_token=UNK_TOKEN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        unk_token=UNK_TOKEN,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
