"""The formats of tool calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from quire.text.chat.written_calls import CLOSE, OPEN
from quire.text.tool_calls.grammar import CallRules
from quire.text.tool_calls.harmony import HarmonyCalls
from quire.text.tool_calls.incoming import Incoming, Reading
from quire.text.tool_calls.markup import (
    BOTH_WORDS,
    JSON_WORDS,
    CallObject,
    JsonArguments,
    KeywordArguments,
    Markup,
    TaggedArguments,
)
from quire.text.tool_calls.markup_grammar import markup_grammar
from quire.text.tool_calls.markup_reader import BlockReader
from quire.text.tool_calls.parser import CallReader, ToolFormat
from quire.text.tool_calls.value_grammar import BARE_KEY, KEY_CHARS, ValueSyntax

# Gemma 4's template writes `None`.
GEMMA_WORDS = {**JSON_WORDS, "null": BOTH_WORDS["null"]}
PYTHON_VALUES = ValueSyntax(words=BOTH_WORDS, comma=", ", colon=": ", has_single_quotes=True)
PYTHON_KEYS = replace(PYTHON_VALUES, colon="=", bare_key=BARE_KEY)
# Its keys are written as they are, paths among them: all but quotes, brackets, spaces, commas and colons.
GEMMA_KEY = rf"[$\/@#+%&*!?=~|();{KEY_CHARS}]{{1,64}}"
GEMMA_VALUES = ValueSyntax(words=GEMMA_WORDS, comma=",", colon=":", bare_key=GEMMA_KEY, quote='<|"|>', is_sorted=True)

# Hermes 2 Pro; Qwen 2.5 and 3.
HERMES = Markup(begin="<tool_call>", open="\n", arguments=CallObject(), close="\n", end="</tool_call>", next_block="\n")
# Llama 3.1, 3.2 and 3.3.
LLAMA3 = Markup(
    begin="<|python_tag|>", between="; ", arguments=CallObject(arguments_key="parameters"), may_be_bare=True
)
# Mistral 7B v0.3, Nemo and Small: an array, after a space in the oldest.
MISTRAL_LIST = Markup(
    begin="[TOOL_CALLS]",
    open="[",
    between=", ",
    arguments=CallObject(),
    close="]",
    inner_marks=("[ARGS]", "[CALL_ID]"),
    id_pattern="[a-zA-Z0-9]{9}",
    id_chars=9,
)
MISTRAL_ID_LIST = replace(MISTRAL_LIST, arguments=CallObject(last_key="id"))
MISTRAL_SPACED_LIST = replace(MISTRAL_LIST, open=" [")
# Magistral and Devstral: a mark and a name for each call; Small 3.2: also an id.
MISTRAL_NAMED = replace(MISTRAL_LIST, open="", between=None, name_end="[ARGS]", arguments=JsonArguments(), close="")
MISTRAL_IDS = replace(MISTRAL_NAMED, id_begin="[CALL_ID]")
MISTRAL_UNMARKED = replace(MISTRAL_IDS, name_end="")
# Qwen3-Coder, Qwen3-Next and Qwen3.5.
QWEN3_XML = replace(
    HERMES,
    call_begin="<function=",
    name_end=">\n",
    arguments=TaggedArguments(key_begin="<parameter=", key_end=">\n", value_end="\n</parameter>\n"),
    call_end="</function>",
)
# Gemma 4: strings are between marks, and have no escapes.
GEMMA4 = Markup(
    begin="<|tool_call>",
    call_begin="call:",
    name_end="{",
    arguments=KeywordArguments(keys=GEMMA_VALUES, values=GEMMA_VALUES),
    call_end="}",
    end="<tool_call|>",
    inner_marks=(GEMMA_VALUES.quote,),
)
# LFM2 and LFM2.5.
LFM2 = Markup(
    begin=OPEN,
    open="[",
    between=", ",
    name_end="(",
    arguments=KeywordArguments(keys=PYTHON_KEYS, values=PYTHON_VALUES),
    call_end=")",
    close="]",
    end=CLOSE,
)
# DeepSeek V3.1; then V3 and R1, with the kind of the call and a block of code.
DEEPSEEK = Markup(
    begin="<｜tool▁calls▁begin｜>",
    between="",
    call_begin="<｜tool▁call▁begin｜>",
    name_end="<｜tool▁sep｜>",
    arguments=JsonArguments(),
    call_end="<｜tool▁call▁end｜>",
    end="<｜tool▁calls▁end｜>",
    inner_marks=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
)
DEEPSEEK_FENCED = replace(
    DEEPSEEK,
    between="\n",
    call_begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    name_end="\n```json\n",
    call_end="\n```<｜tool▁call▁end｜>",
)


# DeepSeek V3.2: an attribute tells strings from other values; V4: another mark.
DEEPSEEK_V32 = Markup(
    begin="<｜DSML｜function_calls>",
    open="\n",
    between="\n",
    call_begin='<｜DSML｜invoke name="',
    name_end='">\n',
    arguments=TaggedArguments(
        key_begin='<｜DSML｜parameter name="',
        key_end='" string="true">',
        json_key_end='" string="false">',
        value_end="</｜DSML｜parameter>\n",
    ),
    call_end="</｜DSML｜invoke>",
    close="\n",
    end="</｜DSML｜function_calls>",
    inner_marks=("｜DSML｜",),
)
DEEPSEEK_V4 = replace(DEEPSEEK_V32, begin="<｜DSML｜tool_calls>", end="</｜DSML｜tool_calls>")
# V4.1: a space in each tag.
DEEPSEEK_V41 = replace(
    DEEPSEEK_V32,
    begin="<｜DSML｜ calls>",
    call_begin='<｜DSML｜ invoke name="',
    arguments=TaggedArguments(
        key_begin='<｜DSML｜ parameter name="',
        key_end='" string="true">',
        json_key_end='" string="false">',
        value_end="</｜DSML｜ parameter>\n",
    ),
    call_end="</｜DSML｜ invoke>",
    end="</｜DSML｜ calls>",
)
# GLM 4.7 and 5; then GLM 4.5 and 4.6, with line breaks.
GLM47 = Markup(
    begin="<tool_call>",
    arguments=TaggedArguments(key_begin="<arg_key>", key_end="</arg_key><arg_value>", value_end="</arg_value>"),
    call_end="</tool_call>",
    inner_marks=("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
GLM45 = replace(
    GLM47,
    name_end="\n",
    arguments=TaggedArguments(key_begin="<arg_key>", key_end="</arg_key>\n<arg_value>", value_end="</arg_value>\n"),
    next_block="\n",
)
# Hunyuan 3: the same tags in a block.
HY_V3 = Markup(
    begin="<tool_calls>",
    open="\n",
    between="\n",
    call_begin="<tool_call>",
    name_end="<tool_sep>\n",
    arguments=TaggedArguments(key_begin="<arg_key>", key_end="</arg_key>\n<arg_value>", value_end="</arg_value>\n"),
    call_end="</tool_call>",
    close="\n",
    end="</tool_calls>",
    inner_marks=("<tool_call>", "<tool_sep>", *GLM47.inner_marks),
)
# Kimi K2, which counts the calls of a conversation: "tool_call_guidance" of its model card.
KIMI_K2 = Markup(
    begin="<|tool_calls_section_begin|>",
    between="",
    call_begin="<|tool_call_begin|>functions.",
    id_begin=":",
    id_pattern="[0-9]+",
    counted_id="functions.{name}:{number}",
    name_end="<|tool_call_argument_begin|>",
    arguments=JsonArguments(),
    call_end="<|tool_call_end|>",
    end="<|tool_calls_section_end|>",
    inner_marks=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
# MiniMax M2.
MINIMAX_M2 = Markup(
    begin="<minimax:tool_call>",
    open="\n",
    between="\n",
    call_begin='<invoke name="',
    name_end='">\n',
    arguments=TaggedArguments(key_begin='<parameter name="', key_end='">', value_end="</parameter>\n"),
    call_end="</invoke>",
    close="\n",
    end="</minimax:tool_call>",
)
# Step 3, whose later versions have Qwen3-Coder's format.
STEP3 = Markup(
    begin="<｜tool_calls_begin｜>",
    open="\n",
    between="\n",
    call_begin='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
    name_end='">\n',
    arguments=TaggedArguments(key_begin='<steptml:parameter name="', key_end='">', value_end="</steptml:parameter>\n"),
    call_end="</steptml:invoke><｜tool_call_end｜>",
    close="\n",
    end="<｜tool_calls_end｜>",
    inner_marks=("<｜tool_call_begin｜>", "<｜tool_call_end｜>", "<｜tool_sep｜>"),
)
# Solar Open 2.
SOLAR_OPEN2 = Markup(
    begin="<|tool_call:start|>",
    name_end="\n",
    arguments=TaggedArguments(
        key_begin="<|tool_arg:start|>", key_end="<|tool_arg:value|>", value_end="<|tool_arg:end|>\n"
    ),
    call_end="<|tool_call:end|>",
    inner_marks=("<|tool_call:end|>", "<|tool_arg:start|>", "<|tool_arg:value|>", "<|tool_arg:end|>"),
)
# MiroThinker: the tags of MCP's clients.
MIROTHINKER = Markup(
    begin="<use_mcp_tool>",
    open="\n",
    between="\n",
    server_begin="<server_name>",
    call_begin="</server_name>\n<tool_name>",
    name_end="</tool_name>\n<arguments>\n",
    arguments=JsonArguments(),
    call_end="\n</arguments>",
    close="\n",
    end="</use_mcp_tool>",
)
# Seed-OSS: lists and objects in Python's syntax.
SEED_OSS = replace(
    QWEN3_XML,
    begin="<seed:tool_call>",
    arguments=TaggedArguments(key_begin="<parameter=", key_end=">", value_end="</parameter>\n", values=PYTHON_VALUES),
    end="</seed:tool_call>",
)
# Granite 3.0 to 3.3.
GRANITE = Markup(begin="<|tool_call|>", open="[", between=", ", arguments=CallObject(), close="]")
# Granite 20B function calling.
GRANITE_20B = Markup(begin="<function_call>", open=" ", arguments=CallObject())
# Command R7B, Command A.
COHERE = Markup(
    begin="<|START_ACTION|>",
    open="[\n    ",
    between=",\n    ",
    arguments=CallObject(name_key="tool_name", arguments_key="parameters", first_key="tool_call_id"),
    id_pattern="[0-9]+",
    close="\n]",
    end="<|END_ACTION|>",
)
# Command R and R+ of 2024, whose templates indent JSON.
COMMAND_R = Markup(
    begin="Action:",
    open="\n```json\n[\n    ",
    between=",\n    ",
    arguments=CallObject(name_key="tool_name", arguments_key="parameters"),
    close="\n]```",
)
# xLAM 2: a list of JSON alone, or in a block of code.
XLAM = replace(GRANITE, begin="```json\n", end="\n```", may_be_bare=True)
# Phi-4-mini, Firefunction v2.
PHI4_MINI = replace(GRANITE, begin="functools")
# Hunyuan A13B; then Apriel, with ids; then Jamba, with line breaks; then MiniMax M1, an object on each line.
HUNYUAN = replace(GRANITE, begin="<tool_calls>", end="</tool_calls>")
HUNYUAN_IDS = replace(HUNYUAN, arguments=CallObject(last_key="id"), id_pattern="[a-zA-Z0-9_-]{1,64}")
HUNYUAN_LINES = replace(HUNYUAN, open="[\n    ", between=",\n    ", close="\n]")
HUNYUAN_OBJECTS = replace(HUNYUAN, open="\n", between="\n", close="\n")
# Nemotron Nano 2, Nemotron Super 1.5.
NEMOTRON = replace(GRANITE, begin="<TOOLCALL>", end="</TOOLCALL>")
# Apertus: objects whose only key is the function's name.
APERTUS = Markup(
    begin="<|tools_prefix|>",
    open="[",
    between=", ",
    call_begin='{"',
    name_end='": ',
    arguments=JsonArguments(),
    call_end="}",
    close="]",
    end="<|tools_suffix|>",
)
# GigaChat 3; then 3.1.
GIGACHAT3 = Markup(begin="function call<|role_sep|>", open="\n", arguments=CallObject(), inner_marks=("<|role_sep|>",))
GIGACHAT31 = Markup(begin="<|function_call|>", arguments=CallObject())
# InternLM 2.5 and 3.
INTERNLM = Markup(
    begin="<|action_start|><|plugin|>",
    open="\n",
    arguments=CallObject(arguments_key="parameters"),
    end="<|action_end|>",
    inner_marks=("<|action_start|>", "<|plugin|>"),
)
# LongCat-Flash.
LONGCAT = replace(HERMES, begin="<longcat_tool_call>", end="</longcat_tool_call>")
# Functionary 3.1, and Llama 3.1 with functions of the user's own.
FUNCTIONARY = Markup(begin="<function=", name_end=">", arguments=JsonArguments(), call_end="</function>")
# Functionary 3.2: the prompt ends with a mark, after which there is a name, or `all` and content.
FUNCTIONARY_V32 = Markup(
    begin=">>>",
    between=">>>",
    name_end="\n",
    arguments=JsonArguments(),
    may_be_bare=True,
    content_begin="all\n",
)
# Llama 3.2 and 4: a list in Python's syntax, whose marks only Llama 4 writes.
PYTHONIC = replace(LFM2, begin="<|python_start|>", end="<|python_end|>", may_be_bare=True)
# OLMo 3: a call in Python's syntax on each line.
OLMO3 = replace(LFM2, begin="<function_calls>", open="\n", between="\n", close="\n", end="</function_calls>")
# FunctionGemma: Gemma 4's syntax with other marks.
FUNCTION_GEMMA_VALUES = replace(GEMMA_VALUES, quote="<escape>")
FUNCTION_GEMMA = replace(
    GEMMA4,
    begin="<start_function_call>",
    arguments=KeywordArguments(keys=FUNCTION_GEMMA_VALUES, values=FUNCTION_GEMMA_VALUES),
    end="<end_function_call>",
    inner_marks=(FUNCTION_GEMMA_VALUES.quote,),
)


@dataclass(frozen=True, slots=True)
class MarkupFormat:
    """A format whose calls have one of several markups.

    Args:
        name: name in options.
        markups: markups; all are read, the first one first, and the grammar has the first one. All have one mark.
    """

    name: str
    markups: tuple[Markup, ...]

    @property
    def marker(self) -> str:
        """The marker that begins calls."""
        return self.markups[0].begin

    @property
    def other_markers(self) -> tuple[str, ...]:
        """Further texts of the format for which a tokenizer may have single tokens."""
        return self.markups[0].marks[1:]

    @property
    def may_be_bare(self) -> bool:
        """True if an output may begin with calls without a marker."""
        return self.markups[0].may_be_bare

    @property
    def content_begin(self) -> str:
        """The text before the content of an output that does not begin with calls; "" if there is none."""
        return self.markups[0].content_begin

    @property
    def id_chars(self) -> int | None:
        """The length of call ids (letters and digits) that templates require; None for any length."""
        return self.markups[0].id_chars

    @property
    def counted_id(self) -> str:
        """The form of call ids with the name and the number of the call; "" if ids are random."""
        return self.markups[0].counted_id

    @property
    def answer_head(self) -> str:
        """No rules: the grammar begins after the reasoning."""
        return ""

    def read_calls(self, incoming: Incoming, pos: int, reader: CallReader) -> Reading:
        """Read a block of calls in any of the markups."""
        for markup in self.markups:
            reader.note_name(None)
            end = yield from BlockReader(markup, incoming, reader).block(pos)
            # The end of the output may truncate a call whose name is known.
            if end is not None or (incoming.is_ended and reader.is_named):
                return end
        return None

    def grammar(self, rules: CallRules) -> str:
        """Return the Lark grammar of outputs in which every call is well formed."""
        return markup_grammar(self.markups[0], rules)

    def led_by(self, markup: Markup) -> MarkupFormat:
        """Return the format with another markup as the first one."""
        return replace(self, markups=(markup, *(other for other in self.markups if other != markup)))


MISTRAL = (MISTRAL_LIST, MISTRAL_SPACED_LIST, MISTRAL_ID_LIST, MISTRAL_NAMED, MISTRAL_IDS, MISTRAL_UNMARKED)
ALL: tuple[ToolFormat, ...] = (
    MarkupFormat("apertus", (APERTUS,)),
    MarkupFormat("cohere", (COHERE,)),
    MarkupFormat("command_r", (COMMAND_R,)),
    MarkupFormat("deepseek", (DEEPSEEK, DEEPSEEK_FENCED)),
    MarkupFormat("deepseek_v32", (DEEPSEEK_V32,)),
    MarkupFormat("deepseek_v4", (DEEPSEEK_V4,)),
    MarkupFormat("deepseek_v41", (DEEPSEEK_V41,)),
    MarkupFormat("functionary", (FUNCTIONARY,)),
    MarkupFormat("functionary_v32", (FUNCTIONARY_V32,)),
    MarkupFormat("functiongemma", (FUNCTION_GEMMA,)),
    MarkupFormat("gemma4", (GEMMA4,)),
    MarkupFormat("gigachat3", (GIGACHAT3,)),
    MarkupFormat("gigachat31", (GIGACHAT31,)),
    MarkupFormat("glm", (GLM47, GLM45)),
    MarkupFormat("granite", (GRANITE,)),
    MarkupFormat("granite_20b", (GRANITE_20B,)),
    HarmonyCalls(),
    MarkupFormat("hermes", (HERMES,)),
    MarkupFormat("hunyuan", (HUNYUAN, HUNYUAN_IDS, HUNYUAN_LINES, HUNYUAN_OBJECTS)),
    MarkupFormat("hy_v3", (HY_V3,)),
    MarkupFormat("internlm", (INTERNLM,)),
    MarkupFormat("kimi_k2", (KIMI_K2,)),
    MarkupFormat("lfm2", (LFM2,)),
    MarkupFormat("llama3", (LLAMA3,)),
    MarkupFormat("longcat", (LONGCAT,)),
    MarkupFormat("minimax_m2", (MINIMAX_M2,)),
    MarkupFormat("mirothinker", (MIROTHINKER,)),
    MarkupFormat("mistral", MISTRAL),
    MarkupFormat("nemotron", (NEMOTRON,)),
    MarkupFormat("olmo3", (OLMO3,)),
    MarkupFormat("phi4_mini", (PHI4_MINI,)),
    MarkupFormat("pythonic", (PYTHONIC,)),
    MarkupFormat("qwen3_xml", (QWEN3_XML,)),
    MarkupFormat("seed_oss", (SEED_OSS,)),
    MarkupFormat("solar_open2", (SOLAR_OPEN2,)),
    MarkupFormat("step3", (STEP3,)),
    MarkupFormat("xlam", (XLAM,)),
)
FORMATS: Mapping[str, ToolFormat] = {form.name: form for form in ALL}
