"""Calls of the same functions in every markup, as published templates write them."""

from __future__ import annotations

import json

GIVEN = {"s": 'it\'s "5"', "i": 5, "b": True, "n": None, "l": [1, "x", False], "o": {"p": "q"}}
JSON = '{"s": "it\'s \\"5\\"", "i": 5, "b": true, "n": null, "l": [1, "x", false], "o": {"p": "q"}}'
OBJECTS = f'{{"name": "look", "arguments": {JSON}}}', '{"name": "look-2", "arguments": {}}'
PARAMETERS = OBJECTS[0].replace("arguments", "parameters"), OBJECTS[1].replace("arguments", "parameters")
ID_OBJECTS = f'{OBJECTS[0][:-1]}, "id": "abcdefgh0"}}', f'{OBJECTS[1][:-1]}, "id": "abcdefgh1"}}'
COHERE = (
    f'{{"tool_call_id": "0", "tool_name": "look", "parameters": {JSON}}}',
    '{"tool_call_id": "1", "tool_name": "look-2", "parameters": {}}',
)
# The tags' texts are those of the published templates, with values one after the other.
VALUES = 'it\'s "5"', "5", "true", "null", '[1, "x", false]', '{"p": "q"}'
PYTHON_WORDS = {"true": "True", "null": "None"}
GEMMA = '{b:true,i:5,l:[1,<|"|>x<|"|>,false],n:None,o:{p:<|"|>q<|"|>},s:<|"|>it\'s "5"<|"|>}'
PYTHON = 's="it\'s \\"5\\"", i=5, b=True, n=None, l=[1, \'x\', False], o={"p": "q"}'


def tagged(begin: str, key_end: str, end: str, *, words: dict[str, str] | None = None) -> str:
    return "".join(
        f"{begin}{key}{key_end}{(words or {}).get(text, text)}{end}" for key, text in zip(GIVEN, VALUES, strict=True)
    )


def dsml(space: str = "") -> str:
    parameter = f"｜DSML｜{space}parameter"
    parameters = tagged(f'<{parameter} name="', '" string="false">', f"</{parameter}>\n")
    return parameters.replace('"s" string="false"', '"s" string="true"')


def indented() -> str:
    """Return two calls as Command R's template writes them."""
    arguments = json.dumps(GIVEN, indent=4).replace("\n", "\n" + 8 * " ")
    return ",\n".join(
        f'    {{\n        "tool_name": "{name}",\n        "parameters": {one}\n    }}'
        for name, one in (("look", arguments), ("look-2", "{}"))
    )


def of_server(name: str, arguments: str) -> str:
    call = f"<server_name>tools</server_name>\n<tool_name>{name}</tool_name>"
    return f"{call}\n<arguments>\n{arguments}\n</arguments>"


QWEN3 = tagged("<parameter=", ">\n", "\n</parameter>\n", words=PYTHON_WORDS)
PYTHON_VALUES = {**PYTHON_WORDS, '[1, "x", false]': "[1, 'x', False]", '{"p": "q"}': "{'p': 'q'}"}
SEED = tagged("<parameter=", ">", "</parameter>\n", words=PYTHON_VALUES)
GLM = tagged("<arg_key>", "</arg_key><arg_value>", "</arg_value>")
GLM_LINES = tagged("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
SOLAR = tagged("<|tool_arg:start|>", "<|tool_arg:value|>", "<|tool_arg:end|>\n")
STEP3 = tagged('<steptml:parameter name="', '">', "</steptml:parameter>\n")
STEP3_CALL = '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="'
MINIMAX = tagged('<parameter name="', '">', "</parameter>\n")
# By format and number of the markup: two calls as the templates render them, or one if a message has one.
EXAMPLES = {
    "apertus-0": f'<|tools_prefix|>[{{"look": {JSON}}}, {{"look-2": {{}}}}]<|tools_suffix|>',
    "cohere-0": f"<|START_ACTION|>[\n    {COHERE[0]},\n    {COHERE[1]}\n]<|END_ACTION|>",
    "command_r-0": f"Action:\n```json\n[\n{indented()}\n]```",
    "deepseek-0": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>look-2<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek-1": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{JSON}\n```"
    "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>look-2\n```json\n{}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "deepseek_v32-0": f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="look">\n{dsml()}</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="look-2">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "deepseek_v4-0": f'<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look">\n{dsml()}</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="look-2">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    "deepseek_v41-0": f'<｜DSML｜ calls>\n<｜DSML｜ invoke name="look">\n{dsml(" ")}</｜DSML｜ invoke>\n'
    '<｜DSML｜ invoke name="look-2">\n</｜DSML｜ invoke>\n</｜DSML｜ calls>',
    "functionary-0": f"<function=look>{JSON}</function><function=look-2>{{}}</function>",
    "functionary_v32-0": f"look\n{JSON}>>>look-2\n{{}}",
    "functiongemma-0": f"<start_function_call>call:look{GEMMA}<end_function_call>".replace('<|"|>', "<escape>")
    + "<start_function_call>call:look-2{}<end_function_call>",
    "gemma4-0": f"<|tool_call>call:look{GEMMA}<tool_call|><|tool_call>call:look-2{{}}<tool_call|>",
    "gigachat3-0": f"function call<|role_sep|>\n{OBJECTS[0]}",
    "gigachat31-0": f"<|function_call|>{OBJECTS[0]}",
    "glm-0": f"<tool_call>look{GLM}</tool_call><tool_call>look-2</tool_call>",
    "glm-1": f"<tool_call>look\n{GLM_LINES}</tool_call>\n<tool_call>look-2\n</tool_call>",
    "granite-0": f"<|tool_call|>[{', '.join(OBJECTS)}]",
    "granite_20b-0": "".join(f"<function_call> {one}" for one in OBJECTS),
    "hermes-0": "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in OBJECTS),
    "hunyuan-0": f"<tool_calls>[{', '.join(OBJECTS)}]</tool_calls>",
    "hunyuan-1": f"<tool_calls>[{', '.join(ID_OBJECTS)}]</tool_calls>",
    "hunyuan-2": f"<tool_calls>[\n    {OBJECTS[0]},\n    {OBJECTS[1]}\n]</tool_calls>",
    "hunyuan-3": f"<tool_calls>\n{OBJECTS[0]}\n{OBJECTS[1]}\n</tool_calls>",
    "hy_v3-0": f"<tool_calls>\n<tool_call>look<tool_sep>\n{GLM_LINES}</tool_call>\n"
    "<tool_call>look-2<tool_sep>\n</tool_call>\n</tool_calls>",
    "internlm-0": f"<|action_start|><|plugin|>\n{PARAMETERS[0]}<|action_end|>",
    "kimi_k2-0": "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
    f"{JSON}<|tool_call_end|><|tool_call_begin|>functions.look-2:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "lfm2-0": f"<|tool_call_start|>[look({PYTHON}), look-2()]<|tool_call_end|>",
    "llama3-0": "; ".join(PARAMETERS),
    "longcat-0": "\n".join(f"<longcat_tool_call>\n{one}\n</longcat_tool_call>" for one in OBJECTS),
    "minimax_m2-0": '<minimax:tool_call>\n<invoke name="look">\n'
    f"{MINIMAX}</invoke>\n"
    '<invoke name="look-2">\n</invoke>\n</minimax:tool_call>',
    "mirothinker-0": f"<use_mcp_tool>\n{of_server('look', JSON)}\n{of_server('look-2', '{}')}\n</use_mcp_tool>",
    "mistral-0": f"[TOOL_CALLS][{', '.join(OBJECTS)}]",
    "mistral-1": f"[TOOL_CALLS] [{', '.join(OBJECTS)}]",
    "mistral-2": f"[TOOL_CALLS][{', '.join(ID_OBJECTS)}]",
    "mistral-3": f"[TOOL_CALLS]look[ARGS]{JSON}[TOOL_CALLS]look-2[ARGS]{{}}",
    "mistral-4": f"[TOOL_CALLS]look[CALL_ID]abcdefgh0[ARGS]{JSON}[TOOL_CALLS]look-2[CALL_ID]abcdefgh1[ARGS]{{}}",
    "mistral-5": f"[TOOL_CALLS]look{JSON}[TOOL_CALLS]look-2{{}}",
    "nemotron-0": f"<TOOLCALL>[{', '.join(OBJECTS)}]</TOOLCALL>",
    "olmo3-0": f"<function_calls>\nlook({PYTHON.replace('True', 'true').replace('None', 'null')})\nlook-2()\n"
    "</function_calls>",
    "phi4_mini-0": f"functools[{', '.join(OBJECTS)}]",
    "pythonic-0": f"[look({PYTHON}), look-2()]",
    "qwen3_xml-0": f"<tool_call>\n<function=look>\n{QWEN3}</function>\n</tool_call>\n"
    "<tool_call>\n<function=look-2>\n</function>\n</tool_call>",
    "seed_oss-0": f"<seed:tool_call>\n<function=look>\n{SEED}"
    "</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=look-2>\n</function>\n</seed:tool_call>",
    "solar_open2-0": f"<|tool_call:start|>look\n{SOLAR}<|tool_call:end|><|tool_call:start|>look-2\n<|tool_call:end|>",
    "step3-0": f'<｜tool_calls_begin｜>\n{STEP3_CALL}look">\n{STEP3}</steptml:invoke><｜tool_call_end｜>\n'
    f'{STEP3_CALL}look-2">\n</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>',
    "xlam-0": f"[{', '.join(OBJECTS)}]",
}
