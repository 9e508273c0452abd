"""Options in a file are those of the command line, which come before them."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.cli.main import main, parse_args
from quire.cli.options import engine_options

TOML = """
model = "some/model"
max-model-len = 4096
swap_space = "2GiB"
enable-prefix-caching = false
served-model-name = ["one", "two"]
port = 9000
allow-origin = ["https://a.example", "https://b.example"]
reasoning-content = true
watch = false
speculative-config = { method = "ngram", num_speculative_tokens = 4 }
"""


def test_the_options_of_a_file_are_taken_and_overridden(tmp_path: Path) -> None:
    file = tmp_path / "options.toml"
    file.write_text(TOML, encoding="utf-8")
    args = parse_args(["serve", "--config", str(file), "--port", "9001"])
    assert (args.model, args.port, args.allow_origin) == (
        "some/model",
        9001,
        ["https://a.example", "https://b.example"],
    )
    assert (args.reasoning_content, args.watch) == (True, False)
    assert engine_options(args) == {
        "model": "some/model",
        "max_model_len": 4096,
        "swap_space": 2 << 30,
        "enable_prefix_caching": False,
        "served_model_name": ["one", "two"],
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4},
    }


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.toml", "max-model-length = 3", "has the unknown option 'max-model-length'"),
        ("a.toml", "config = 'b.toml'", "has the unknown option 'config'"),
        ("a.yaml", "max-model-len: 3", "YAML is not read"),
        ("a.json", "[1]", "must hold an object"),
        ("a.json", "{", "is not TOML or JSON"),
        ("missing.toml", None, "cannot be read: No such file"),
    ],
)
def test_a_wrong_file_is_named(
    tmp_path: Path, name: str, text: str | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text, encoding="utf-8")
    assert main(["generate", "--prompt", "a", "--config", str(file)]) == 2
    assert words in capsys.readouterr().err
