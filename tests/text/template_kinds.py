"""Small chat templates of the kinds that models have, and tokens of their tokenizers."""

from __future__ import annotations

from typing import Final, NamedTuple

TRIMMED = "{{ message['content'] | trim }}"
CHATML: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Texts are trimmed; tools are written with indented JSON, and calls as JSON.
LLAMA3: Final = (
    "{{ bos_token }}{% if tools is not none %}<|start_header_id|>tools<|end_header_id|>\n\n"
    "{{ tools | tojson(indent=4) }}<|eot_id|>{% endif %}"
    "{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{% if message.tool_calls %}{{ message.tool_calls[0].function | tojson }}"
    "{% elif message.role == 'tool' %}{{ message.content | tojson }}"
    f"{{% else %}}{TRIMMED}{{% endif %}}<|eot_id|>{{% endfor %}}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# The system's text is a part of the first user's; markers are pieces of words around spaces.
MISTRAL: Final = (
    "{% set ns = namespace(system='') %}{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' %}{% set ns.system = message.content + '\n\n' %}"
    "{% elif message.role == 'user' %}[INST] {{ (ns.system + message.content) | trim }} [/INST]{% set ns.system = '' %}"
    "{% elif message.role == 'tool' %}[TOOL_RESULTS] {{ {'content': message.content, 'id': message.tool_call_id}"
    " | tojson(ensure_ascii=True) }}[/TOOL_RESULTS]"
    "{% elif message.tool_calls %}[TOOL_CALLS] {{ message.tool_calls | map(attribute='function') | list | tojson }}</s>"
    "{% else %} {{ message.content | trim }}</s>{% endif %}{% endfor %}"
)
GEMMA: Final = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'].strip() + '\n\n' %}"
    "{% set loop_messages = messages[1:] %}{% else %}{% set first = '' %}{% set loop_messages = messages %}{% endif %}"
    "{% for message in loop_messages %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + (first if loop.first else '') + (message['content'] | trim) }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# Earlier thinking is cut off; calls are written where there is no content.
DEEPSEEK: Final = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}"
    "{% elif message['role'] == 'assistant' and message['content'] is none %}{% for call in message['tool_calls'] %}"
    "{{ '<｜call▁begin｜>' + call['function']['name'] + '<｜call▁sep｜>' + call['function']['arguments'] }}"
    "{% endfor %}<｜end▁of▁sentence｜>"
    "{% elif message['role'] == 'tool' %}{{ '<｜tool▁output｜>' + message['content'] }}"
    "{% else %}{% set content = message['content'] %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"
)
# Searches backwards for the last question, and takes content apart at its markers.
QWEN3: Final = (
    "{% set ns = namespace(last=messages|length - 1, found=false) %}{% for message in messages[::-1] %}"
    "{% set index = (messages|length - 1) - loop.index0 %}{% if not ns.found and message.role == 'user' and not "
    "(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}"
    "{% set ns.found = true %}{% set ns.last = index %}{% endif %}{% endfor %}"
    "{% for message in messages %}{% set content = message.content %}"
    "{% if message.role in ('system', 'user') %}{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}"
    "{% elif message.role == 'assistant' %}{% set reasoning = '' %}"
    "{% if message.reasoning_content is string %}{% set reasoning = message.reasoning_content %}"
    "{% elif '</think>' in content %}"
    "{% set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last %}{{ '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}{% endif %}{{ content }}"
    '{% for call in message.tool_calls or [] %}{{ \'\n<tool_call>\n{"name": "\' + call.function.name }}'
    "{{ '\", \"arguments\": ' }}{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}<|im_end|>\n"
    "{% else %}{{ '<|im_start|>user\n<tool_response>\n' ~ content ~ '\n</tool_response><|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Macros write tools and content; keys of clients stand between `<` and `>`.
CODER: Final = (
    "{% macro visible(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}"
    "{{ part.text }}{% endfor %}{% endif %}{% endmacro %}"
    "{% macro fields(value) %}{% for key, each in value.items() %}{{ '\n<' ~ key ~ '>' }}"
    "{% if each is mapping %}{{ fields(each) }}{% else %}{{ each | string }}{% endif %}{{ '</' ~ key ~ '>' }}"
    "{% endfor %}{% endmacro %}"
    "{% if tools %}<|im_start|>system"
    "{% for tool in tools %}{{ fields(tool.function) }}{% endfor %}<|im_end|>{% endif %}"
    "{% for message in messages %}{% set content = visible(message.content) %}"
    "{% if '</think>' in content %}{% set content = (content.split('</think>') | last).strip() %}{% endif %}"
    "{{ '<|im_start|>' ~ message.role }}{% for call in message.tool_calls or [] %}{{ fields(call.function) }}"
    "{% endfor %}{{ '\n' ~ content }}{% if message.name %} ({{ message.name | upper }}){% endif %}<|im_end|>"
    "{% endfor %}"
)
# Control tokens are joined of pieces.
PHI: Final = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)
HARMONY: Final = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% if '<|channel|>final<|message|>' in message.content %}{{ raise_exception('a channel in the content') }}"
    "{% endif %}"
    "{% if message.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}"
    "{% endif %}{% if message.tool_calls %}{% set call = message.tool_calls[0].function %}"
    "{{ '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}"
    "{{ call.arguments | tojson }}{{ '<|call|>' }}"
    "{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}{% endif %}"
    "{% elif message.role == 'tool' %}{{ '<|start|>functions to=assistant<|message|>' }}{{ message.content | tojson }}"
    "{{ '<|end|>' }}{% else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# Reads parts: a string gives nothing.
PARTS: Final = (
    "{% for message in messages %}{{ message.role }}:{% for part in message.content %}{% if part.type == 'text' %}"
    "{{ part.text }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SELECTED: Final = (
    "{% for message in messages %}<|im_start|>"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}"
    "<|im_end|>{% endfor %}"
)
# Parts of a system message only.
SYSTEM_PARTS: Final = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}[SYSTEM_PROMPT]{{ messages[0]['content'][0]['text'] }}"
    "[/SYSTEM_PROMPT]{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}{% if message['role'] == 'user' %}[INST]{{ message['content'] }}[/INST]"
    "{% else %}{{ message['content'] }}</s>{% endif %}{% endfor %}"
)
# Writes beginnings, other cases and single characters of texts.
EXOTIC: Final = (
    "{% for message in messages %}<|im_start|>{{ message.content[:40] | upper }}{{ message.content[2:-2] }}"
    "{% for char in message.content %}{{ char }}{% endfor %}{{ '%s %s' % (message.content, message.role) }}"
    "{{ message.content.replace('<think>', '').replace('\n', ' ') }}{{ message.content.splitlines() | join('\n') }}"
    "{{ [message.content, 'x'] | join(', ') }}{{ '{}'.format(message.content) }}{{ message.content.split() }}"
    "{{ message.content.partition('>')[2] }}{{ {'a': message.content} }}{{ message.content | indent }}<|im_end|>"
    "{% endfor %}"
)


class TemplateKind(NamedTuple):
    """A template, and the tokens that its tokenizer adds."""

    source: str
    special: tuple[str, ...]
    others: tuple[str, ...] = ()
    has_tools: bool = False
    reads_parts: bool = False
    reads_system_parts: bool = False


IM = ("<|im_start|>", "<|im_end|>")
INST = ("[INST]", "[/INST]")
SENTENCE = ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>")
THINK = ("<think>", "</think>")
TOOL = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
MARKS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>")
KINDS: Final[dict[str, TemplateKind]] = {
    "chatml": TemplateKind(CHATML, IM),
    "llama3": TemplateKind(LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), has_tools=True),
    "mistral": TemplateKind(
        MISTRAL, ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"), has_tools=True
    ),
    "gemma": TemplateKind(GEMMA, ("<start_of_turn>", "<end_of_turn>"), ("<b>",)),
    "deepseek": TemplateKind(
        DEEPSEEK,
        (
            "<｜User｜>",
            "<｜Assistant｜>",
            "<｜end▁of▁sentence｜>",
            "<｜call▁begin｜>",
            "<｜call▁sep｜>",
            "<｜tool▁output｜>",
        ),
        THINK,
        has_tools=True,
    ),
    "qwen3": TemplateKind(QWEN3, IM, (*THINK, *TOOL), has_tools=True),
    "coder": TemplateKind(CODER, IM, (*THINK, *TOOL), has_tools=True),
    "phi": TemplateKind(PHI, ("<|user|>", "<|system|>", "<|assistant|>", "<|end|>", "<|tool|>")),
    "harmony": TemplateKind(HARMONY, MARKS, has_tools=True),
    "parts": TemplateKind(PARTS, ("<end_of_utterance>",), reads_parts=True),
    "selected parts": TemplateKind(SELECTED, IM, reads_parts=True),
    "parts of the system": TemplateKind(
        SYSTEM_PARTS, (*INST, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"), reads_system_parts=True
    ),
    "exotic": TemplateKind(EXOTIC, IM, THINK),
}
