"""`quire quantize`: folders that are read again, and refusals that leave nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.cli.main import main
from quire.cli.quantization import compressed_tensors
from quire.cli.quantization.paged_rows import run_sequences
from quire.engine.llm import LLM
from quire.models.checkpoints.checkpoint import Checkpoint, locate
from quire.models.checkpoints.tensor_reader import TensorReader
from quire.models.loading.loading import load_decoder
from quire.text.tokenizers.tokenizer import Tokenizer
from tests.conformance.checkpoints import save_checkpoint

TEXT = "Once upon a time, a small fox lived alone in a sunny garden. The fox was very curious and liked to sing."


def logprobs(model: str) -> torch.Tensor:
    """Return the log probabilities of all tokens at each place of a text."""
    checkpoint = Checkpoint.open(model)
    decoder = load_decoder(checkpoint, device="cpu", dtype=torch.bfloat16)
    ids = torch.tensor(Tokenizer.from_folder(checkpoint.folder).encode(TEXT))
    with torch.inference_mode():
        return decoder.logits(run_sequences(decoder, ids, [len(ids)])).log_softmax(-1)


@pytest.mark.parametrize(
    ("options", "size"),
    [
        (["--to", "int8"], 0.58),
        (["--to", "int4", "--method", "rounded", "--asymmetric", "--group-size", "64"], 0.41),
        pytest.param(["--to", "int4", "--calibration-tokens", "4096"], 0.42, marks=pytest.mark.slow),
    ],
    ids=("int8", "int4-rounded", "int4-calibrated"),
)
def test_a_folder_is_served(options: list[str], size: float, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["quantize", "bundled", str(out), *options]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    names = {path.name for path in out.iterdir()}
    assert names == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    }
    whole = (locate("bundled") / "model.safetensors").stat().st_size
    assert (out / "model.safetensors").stat().st_size < size * whole
    config = json.loads((out / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    plain = logprobs("bundled")
    assert (plain.exp() * (plain - logprobs(str(out)))).sum(-1).mean() < 0.02
    if "int8" in options:
        with LLM(str(out), num_kv_blocks=64, max_model_len=256) as llm:
            assert llm.generate("Once upon a time")[0].outputs[0].text


def test_shards_and_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed_tensors.FolderWriter.__init__, "__defaults__", (40_000,))
    source, out = save_checkpoint("qwen3", tmp_path / "source"), tmp_path / "out"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).write_bytes((locate("bundled") / name).read_bytes())
    assert main(["quantize", str(source), str(out), "--to", "int8", "--dtype", "float16"]) == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    shards = sorted({*index["weight_map"].values()})
    assert len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    checkpoint = Checkpoint.open(str(out))
    assert index["metadata"]["total_size"] == sum(tensor.num_bytes for tensor in checkpoint.tensors.values())
    assert {tensor.dtype for tensor in checkpoint.tensors.values()} == {"F16", "I8"}
    was, reader = TensorReader(Checkpoint.open(str(source))), TensorReader(checkpoint)
    name = "model.layers.1.mlp.down_proj.weight"
    plain, rounded = was.read(name), reader.read(name)
    assert isinstance(plain, torch.Tensor)
    assert not isinstance(rounded, torch.Tensor)
    steps = plain.abs().amax(1, keepdim=True) / 127
    assert ((rounded.weight.dequantize() - plain).abs() <= 0.6 * steps).all()


@pytest.mark.parametrize(("form", "file"), [("int8", "model.safetensors"), ("q8_0", ""), ("bf16", "")])
def test_the_same_files_are_written_without_numpy(form: str, file: str, tmp_path: Path) -> None:
    # Torch looks for numpy when it is imported, so none of its tensors can be an array in that process.
    script = "import sys\nsys.modules['numpy'] = None\nfrom quire.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    out, other = tmp_path / "out", tmp_path / "other"
    ran = subprocess.run(
        [sys.executable, "-c", script, "quantize", "bundled", str(out), "--to", form], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    assert main(["quantize", "bundled", str(other), "--to", form]) == 0
    written = (out / file).read_bytes()
    assert written == (other / file).read_bytes()
    if file:
        # The library's own function, which needs numpy, writes the same bytes.
        save_file(load_file(out / file), tmp_path / file, metadata={"format": "pt"})
        assert written == (tmp_path / file).read_bytes()


def test_calibrated_codes_and_tensors_that_no_model_reads(tmp_path: Path) -> None:
    # A model of one layer in a folder that has the tensors of four.
    for path in locate("bundled").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    folders = [tmp_path / "calibrated", tmp_path / "rounded"]
    common = ["--to", "int4", "--group-size", "64"]
    assert main(["quantize", str(tmp_path), str(folders[0]), *common, "--calibration-tokens", "2048"]) == 0
    assert main(["quantize", str(tmp_path), str(folders[1]), *common, "--method", "rounded"]) == 0
    plain = logprobs(str(tmp_path))
    calibrated, rounded = ((plain.exp() * (plain - logprobs(str(each)))).sum(-1).mean() for each in folders)
    assert 0 < calibrated < 0.8 * rounded
    tensors = Checkpoint.open(str(folders[0])).tensors
    assert tensors["model.layers.3.mlp.up_proj.weight"].dtype == "BF16"
    assert "model.layers.0.mlp.up_proj.weight_packed" in tensors
    ignored = json.loads((folders[0] / "config.json").read_text())["quantization_config"]["ignore"]
    assert len(ignored) == 1 + 3 * 7


def test_what_cannot_be_done_is_one_line_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"

    def refused(*arguments: str) -> str:
        assert main(["quantize", *arguments]) == 2
        assert {*tmp_path.iterdir()} <= {tmp_path / "there", tmp_path / "experts"}
        return capsys.readouterr().err

    model = ["bundled", str(out), "--to", "int4"]
    assert "group_size 128 does not divide the 704 inputs" in refused(*model, "--group-size", "128")
    assert "sizes that divide those of all layers: 32, 64" in refused(*model, "--group-size", "128")
    assert "text.txt cannot be read" in refused(*model, "--calibration", str(tmp_path / "text.txt"))
    assert "--asymmetric is for int4, not for int8" in refused("bundled", str(out), "--to", "int8", "--asymmetric")
    assert "--group-size is for int4" in refused("bundled", str(out), "--to", "q8_0", "--group-size", "32")
    assert "--dtype is for int4 and int8" in refused("bundled", str(out), "--to", "q8_0", "--dtype", "float16")
    assert "rounded takes no --calibration" in refused(*model, "--method", "rounded", "--calibration", "text.txt")
    assert "at least 1" in refused(*model, "--calibration-tokens", "0")
    assert "--num-threads must be at least 1, got 0" in refused(*model, "--num-threads", "0")
    assert "cannot be written" in refused("bundled", str(tmp_path / "no" / "out"), "--to", "int8")
    (tmp_path / "there").mkdir()
    assert "exists already" in refused("bundled", str(tmp_path / "there"), "--to", "int8")
    experts = save_checkpoint("llama4", tmp_path / "experts")
    assert "experts in one tensor" in refused(str(experts), str(out), "--to", "int8")


def test_a_quantised_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", "bundled", str(tmp_path / "a"), "--to", "int8"]) == 0
    assert main(["quantize", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "int8"]) == 2
    assert "quantised already" in capsys.readouterr().err


def test_a_failure_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compressed_tensors.FolderWriter, "finish", fail)
    assert main(["quantize", "bundled", str(tmp_path / "out"), "--to", "int8"]) == 130
    assert not [*tmp_path.iterdir()]
