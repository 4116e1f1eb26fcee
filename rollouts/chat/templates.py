"""Chat templates for tokenizers that have none: tokenizer.chat_template = CHATML, or template_kwargs={"chat_template": CHATML}.

A model follows the template that it was tuned with. These are for models that were tuned with one of them and lost it, and for base models
that are to learn one. The tokens that end a turn must be special tokens of the tokenizer, and the engine must stop at them.
"""

from __future__ import annotations

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Turns between <|im_start|> and <|im_end|>; any roles."""

LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
    "{% for message in turns %}"
    "{% if (message['role'] == 'assistant') != (loop.index0 % 2 == 1) %}"
    "{{ raise_exception('roles must alternate: user, assistant, user, ...') }}"
    "{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}"
    "{% else %}"
    "{{ bos_token + '[INST] ' + (system if loop.first else '') + message['content'].strip() + ' [/INST]' }}"
    "{% endif %}{% endfor %}"
)
"""[INST] question [/INST] answer </s>. A system message stands inside the first question; every role but assistant is a question."""

LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
"""A header with the role, the text, <|eot_id|>; any roles."""

ZEPHYR = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
"""A line with the role, the text and the end of text; needs no further special token."""
