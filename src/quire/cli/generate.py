"""`quire generate`: completes prompts, all at once; without a prompt it runs the demonstration."""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.early_checks import checked_engine_options
from quire.cli.options import add_engine_options, add_sampling_options, sampling_options
from quire.cli.structured_options import add_structured_options, structured_options
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.platform.bounded.files import reason_of
from quire.sequences.lora import LoRARequest
from quire.sequences.params import NO_CHOICE, SamplingParams

if TYPE_CHECKING:
    from quire.cli.options import Subparsers
    from quire.engine.llm import LLM
    from quire.engine.outputs.logprobs import PositionLogprobs
    from quire.engine.outputs.outputs import RequestOutput

DEFAULT_MAX_TOKENS = 128
EXIT_FAILED = 1


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "generate",
        help="complete prompts, all at once",
        description="Complete prompts, all at once, from paged memory. Prompts come from --prompt, --prompts-file or "
        "a pipe, which must have one; without any of these, the bundled model shows a demonstration. At most "
        f"{DEFAULT_MAX_TOKENS} new tokens without --max-tokens.",
    )
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated")
    parser.add_argument("--prompts-file", metavar="FILE", help="prompts, one a line; - is standard input")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line, for each prompt")
    parser.add_argument("--stream", action="store_true", help="print text as it comes; with --json, each delta")
    parser.add_argument("--lora-name", metavar="NAME", help="the adapter of --lora-modules that the prompts go through")
    parser.add_argument("--demo", action="store_true", help="show the demonstration, also with piped input")
    add_engine_options(parser)
    add_sampling_options(parser, DEFAULT_MAX_TOKENS)
    add_structured_options(parser)
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        QuireError: an option, a prompt or a parameter is refused.
    """
    overrides = sampling_options(args) | structured_options(args)
    prompts = [] if args.demo else _prompts(args)
    if not prompts and not args.demo and args.model != "bundled":
        raise ConfigError("there is no prompt; give --prompt, --prompts-file or a pipe", field="prompt")
    if not args.json:
        for name in ("logprobs", "prompt_logprobs"):
            if overrides.get(name) is not None:
                raise ConfigError(f"--{name.replace('_', '-')} needs --json", field=name)
        if args.stream and len(prompts) > 1:
            raise ConfigError("--stream takes one prompt, unless --json marks which text is whose", field="stream")
        if args.stream and overrides.get("n", 1) > 1:
            raise ConfigError("--stream takes n=1, unless --json marks which text is whose", field="n")
    if args.stream and "beam_width" in overrides:
        raise ConfigError("--stream has nothing to show before the end of a beam search", field="stream")
    if not prompts and (args.json or args.stream):
        raise ConfigError("the demonstration has neither --json nor --stream; give a prompt", field="prompt")
    wanted = SamplingParams(**overrides).structured_outputs  # validates the parameters before a model is loaded
    if wanted is not None:
        from quire.text.structured.compiled_grammar import check_source

        check_source(wanted)

    options = checked_engine_options(args)
    if args.lora_name is not None:
        names = [*EngineConfig.from_options(**options).lora.adapters]
        if args.lora_name not in names:
            allowed = f"one of {', '.join(names)}, from --lora-modules" if names else "left out without --lora-modules"
            raise ConfigError(f"--lora-name must be {allowed}, got {args.lora_name!r}", field="lora_name")
    from quire.engine.llm import LLM

    with LLM(**options) as llm:
        if not prompts:
            from quire.cli import demo

            return demo.run(llm, overrides)
        for line in llm.resolved.lines():
            print(line, file=sys.stderr)
        defaults = {"max_tokens": DEFAULT_MAX_TOKENS, **(NO_CHOICE if "beam_width" in overrides else {})}
        params = replace(llm.get_default_sampling_params(), **{**defaults, **overrides})
        adapter = None if args.lora_name is None else LoRARequest(args.lora_name)
        if args.stream:
            return _print_stream(llm, prompts, params, adapter, is_json=args.json)
        logging.getLogger("quire.engine.llm").addHandler(logging.NullHandler())  # `_report_errors` reports them
        is_shown = sys.stderr.isatty() and not args.json
        outputs = llm.generate(prompts, params, use_tqdm=is_shown, lora_request=adapter)
    for idx, output in enumerate(outputs):
        if args.json:
            print(json.dumps(as_json(output), ensure_ascii=False))
        else:
            _print_plain(output, is_first=idx == 0, has_title=len(outputs) > 1)
    return _report_errors(outputs)


def as_json(output: RequestOutput) -> dict[str, Any]:
    """Return an output or a delta as JSON values."""
    account = output.prompt_account
    shown: dict[str, Any] = {
        "index": int(output.request_id),
        "prompt": output.prompt,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "num_disk_tokens": output.num_disk_tokens,
        "cache_hit_end": output.cache_hit_end,
        "cache_differs_at": output.cache_differs_at,
        "prompt_tokens_by_source": None if account is None else account.sources._asdict(),
        "computed_tokens_by_reason": None if account is None else account.by_reason(),
        "finished": output.finished,
        "outputs": [],
    }
    if output.error is not None:
        shown["error"] = output.error
    if output.prompt_logprobs is not None:
        shown["prompt_logprobs"] = [
            None if position is None else _logprobs(position) for position in output.prompt_logprobs
        ]
    for sample in output.outputs:
        one: dict[str, Any] = {"index": sample.index, "text": sample.text, "token_ids": sample.token_ids}
        one |= {"finish_reason": sample.finish_reason, "stop_reason": sample.stop_reason}
        if sample.beam_score is not None:
            one["beam_score"] = sample.beam_score
        if sample.logprobs is not None:
            one["logprobs"] = [_logprobs(position) for position in sample.logprobs]
        shown["outputs"].append(one)
    return shown


def _logprobs(position: PositionLogprobs) -> list[dict[str, Any]]:
    """Return the log probabilities of one position, the chosen token first; minus infinity becomes null."""
    return [
        {
            "token_id": token_id,
            "logprob": entry.logprob if math.isfinite(entry.logprob) else None,
            "rank": entry.rank,
            "text": entry.decoded_token,
        }
        for token_id, entry in position.items()
    ]


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts: list[str] = list(args.prompt)
    if args.prompts_file == "-" or (not prompts and args.prompts_file is None and _has_piped_input()):
        prompts += [line for line in sys.stdin.read().splitlines() if line.strip()]
        if not prompts and args.prompts_file is None:
            # A script that sends no prompts by mistake must not take the demonstration for answers.
            raise ConfigError(
                "standard input is a pipe or a file without a prompt; --demo shows the demonstration", field="prompt"
            )
    elif args.prompts_file is not None:
        try:
            lines = Path(args.prompts_file).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"prompts_file {args.prompts_file} cannot be read: {reason_of(error)}", field="prompts_file"
            ) from error
        prompts += [line for line in lines if line.strip()]
    if args.prompts_file is not None and not prompts:
        raise ConfigError(f"prompts_file {args.prompts_file} has no prompt", field="prompts_file")
    return prompts


def _has_piped_input() -> bool:
    """Return whether standard input is a pipe, a file or a socket."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):  # no standard input
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def _print_stream(
    llm: LLM, prompts: list[str], params: SamplingParams, adapter: LoRARequest | None, *, is_json: bool
) -> int:
    failed = []
    for delta in llm.stream(prompts, params, lora_request=adapter):
        if delta.error is not None:
            failed.append(delta)
        text = json.dumps(as_json(delta), ensure_ascii=False) + "\n" if is_json else "".join(_texts(delta))
        sys.stdout.write(text)
        sys.stdout.flush()
    if not is_json:
        print()
    return _report_errors(failed)


def _print_plain(output: RequestOutput, *, is_first: bool, has_title: bool) -> None:
    if has_title:
        print(("" if is_first else "\n") + f"> {output.prompt}")
    for text in _texts(output):
        print(text)


def _texts(output: RequestOutput) -> list[str]:
    """Return the text of each sample, or its token ids without detokenization."""
    return [
        sample.text if sample.text or not sample.token_ids else " ".join(map(str, sample.token_ids))
        for sample in output.outputs
    ]


def _report_errors(outputs: list[RequestOutput]) -> int:
    failed = [output for output in outputs if output.error is not None]
    for output in failed:
        print(f"quire: error: prompt {int(output.request_id) + 1} failed: {output.error}", file=sys.stderr)
    return EXIT_FAILED if failed else 0
