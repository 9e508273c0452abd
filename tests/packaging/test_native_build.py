"""Building the native kernels: every level, again only when something changed, never in the way."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

import hatch_build
from hatch_build import Compiler, build, find_compiler, levels_of

ROOT = Path(__file__).resolve().parents[2]
LEVELS = levels_of(platform.machine())
NAMES = [f"libquire_{level.name}.so" for level in LEVELS]
X86 = pytest.mark.skipif(len(LEVELS) == 1, reason="one level only on this kind of processor")

FEATURES = {
    "portable": "",
    "avx2": " sse4.2 avx2",
    "avx_vnni": " sse4.2 avx2 avx_vnni",
    "avx512": " sse4.2 avx2 avx512",
    "avx512_bf16": " sse4.2 avx2 avx512 avx512_bf16",
}


class Wrapped:
    """A compiler that writes down each compilation and refuses what it is told to refuse."""

    def __init__(self, compiler: Compiler, path: Path, *, refuses: str = "no such flag") -> None:
        self.log = path / "log"
        script = path / "cxx"
        script.write_text(
            f'#!/bin/sh\necho "$*" >>{self.log}\n'
            f'case "$*" in *"{refuses}"*) echo "unknown {refuses}" >&2; exit 1;; esac\n'
            f'exec {" ".join(compiler.command)} "$@"\n',
            encoding="utf-8",
        )
        script.chmod(0o755)
        self.compiler = Compiler((str(script),), compiler.version)

    def num_compilations(self) -> int:
        """Count the calls since the last time this was asked."""
        count = len(self.log.read_text(encoding="utf-8").splitlines()) if self.log.exists() else 0
        self.log.unlink(missing_ok=True)
        return count


@pytest.fixture
def wrapped(compiler: Compiler, tmp_path: Path) -> Wrapped:
    """The compiler of this machine, writing down its calls."""
    return Wrapped(compiler, tmp_path)


def loaded(library: Path) -> ctypes.CDLL:
    """Load a copy of a library: the loader would give the old one again for a name that it knows."""
    copy = Path(tempfile.mkdtemp(dir=library.parent.parent), library.name)
    return ctypes.CDLL(str(shutil.copy(library, copy)))


def said_by(library: Path, function: str) -> str:
    """Return the text that a function of a library returns."""
    pointer = loaded(library)[function]
    pointer.restype = ctypes.c_char_p
    text: bytes = pointer()
    return text.decode()


def present(folder: Path) -> set[str]:
    """Return the names of all that is not a source."""
    return {path.name for path in folder.iterdir() if path.suffix not in (".cpp", ".h")}


@pytest.mark.slow
def test_the_kernels_of_this_tree_were_built_at_every_level_without_a_warning(
    compiler: Compiler, tmp_path: Path
) -> None:
    folder = ROOT / hatch_build.FOLDER
    (digest, *names), messages = hatch_build.read_record(folder / hatch_build.RECORD)
    if digest != hatch_build.digest_of(folder, compiler, LEVELS):
        pytest.skip("the kernels of this tree are of other sources, or of another compiler")
    assert names == NAMES
    assert messages == ""
    # Only this one runs on every processor. That it loads shows that no name in it is left undefined.
    ctypes.CDLL(str(shutil.copy(folder / "libquire_portable.so", tmp_path)))


def test_what_the_compiler_says_is_printed_and_recorded(
    compiler: Compiler, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "more.cpp").write_text("static int never_called() { return 0; }\n", encoding="utf-8")
    assert [path.name for path in build(folder, compiler, LEVELS)] == NAMES
    _, messages = hatch_build.read_record(folder / hatch_build.RECORD)
    assert "never_called" in messages
    assert capfd.readouterr().err == messages


def test_each_level_is_compiled_for_what_it_names(compiler: Compiler, folder: Path) -> None:
    libraries = build(folder, compiler, LEVELS)
    assert [said_by(library, "level") for library in libraries] == [level.name for level in LEVELS]
    assert [said_by(library, "features") for library in libraries] == [FEATURES[level.name] for level in LEVELS]


@pytest.mark.parametrize(
    ("machine", "names"),
    [("x86_64", list(FEATURES)), ("aarch64", ["portable"]), ("arm64", ["portable"]), ("riscv64", ["portable"])],
)
def test_other_processors_have_the_portable_level_only(machine: str, names: list[str]) -> None:
    assert [level.name for level in levels_of(machine)] == names


def test_nothing_is_compiled_when_nothing_changed(wrapped: Wrapped, folder: Path) -> None:
    first = build(folder, wrapped.compiler, LEVELS)
    assert wrapped.num_compilations() == len(LEVELS)
    assert build(folder, wrapped.compiler, LEVELS) == first
    assert wrapped.num_compilations() == 0


@pytest.mark.parametrize("file", ["kernels.cpp", "number.h", "more.h"])
def test_a_changed_source_is_compiled_again(wrapped: Wrapped, folder: Path, file: str) -> None:
    build(folder, wrapped.compiler, LEVELS)
    with (folder / file).open("a", encoding="utf-8") as source:
        source.write("#undef NUMBER\n#define NUMBER 2\n")
    libraries = build(folder, wrapped.compiler, LEVELS)
    assert wrapped.num_compilations() == 2 * len(LEVELS)
    assert {loaded(library).number() for library in libraries} == ({2} if file == "number.h" else {1})


def test_another_version_of_the_compiler_compiles_again(wrapped: Wrapped, folder: Path) -> None:
    build(folder, wrapped.compiler, LEVELS)
    build(folder, wrapped.compiler._replace(version="newer"), LEVELS)
    assert wrapped.num_compilations() == 2 * len(LEVELS)


def test_other_flags_compile_again(wrapped: Wrapped, folder: Path) -> None:
    build(folder, wrapped.compiler, LEVELS)
    slower = [level._replace(flags=(*level.flags, "-O1")) for level in LEVELS]
    build(folder, wrapped.compiler, slower)
    assert wrapped.num_compilations() == 2 * len(LEVELS)


def test_a_library_that_disappeared_is_built_again(wrapped: Wrapped, folder: Path) -> None:
    libraries = build(folder, wrapped.compiler, LEVELS)
    libraries[-1].unlink()
    assert build(folder, wrapped.compiler, LEVELS) == libraries
    assert libraries[-1].exists()


def test_a_running_process_keeps_the_library_it_has_open(compiler: Compiler, folder: Path) -> None:
    first = build(folder, compiler, LEVELS[:1])
    inode = first[0].stat().st_ino
    (folder / "number.h").write_text("#define NUMBER 2\n", encoding="utf-8")
    with first[0].open("rb"):  # keeps the number from being given to the new file
        assert build(folder, compiler, LEVELS[:1])[0].stat().st_ino != inode


@X86
def test_a_level_that_the_compiler_refuses_is_left_out(
    compiler: Compiler, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    build(folder, compiler, LEVELS)  # so that there is an older library of that level, which must go
    old = Wrapped(compiler, tmp_path, refuses="-mavx512bf16")
    for _ in range(2):
        assert [path.name for path in build(folder, old.compiler, LEVELS)] == NAMES[:-1]
        assert present(folder) == {*NAMES[:-1], hatch_build.RECORD}
    assert old.num_compilations() == len(LEVELS), "a refusal is no reason to compile everything once more"
    said = capfd.readouterr()
    assert "native: left out, because the compiler refuses them: avx512_bf16\n" in said.out
    assert said.err == "unknown -mavx512bf16\n"


def test_sources_with_an_error_leave_no_library_and_are_tried_again(
    wrapped: Wrapped, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    build(folder, wrapped.compiler, LEVELS)
    good = (folder / "number.h").read_text(encoding="utf-8")
    (folder / "number.h").write_text("#error this is wrong\n", encoding="utf-8")
    for _ in range(2):
        assert build(folder, wrapped.compiler, LEVELS) == []
        assert present(folder) == set()
    assert capfd.readouterr().err.count("error: #error this is wrong") == 2, "once a build, not once a level"
    assert wrapped.num_compilations() == 3 * len(LEVELS)
    (folder / "number.h").write_text(good, encoding="utf-8")
    assert len(build(folder, wrapped.compiler, LEVELS)) == len(LEVELS)


@pytest.mark.parametrize("command", ["/bin/false", "/nowhere/c++"])
def test_a_compiler_that_does_not_answer_is_none(command: str) -> None:
    assert find_compiler(command) is None


def test_without_a_choice_the_first_compiler_on_the_path_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, answer in [("g++", "exit 1"), ("clang++", "echo version 9"), ("c++", "echo version 8")]:
        (tmp_path / name).write_text(f"#!/bin/sh\n{answer}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_compiler(None) == Compiler(("clang++",), "version 9\n")
    assert find_compiler("") == Compiler(("clang++",), "version 9\n")
    assert find_compiler("c++ -pipe") == Compiler(("c++", "-pipe"), "version 8\n")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert find_compiler(None) is None


def test_without_a_compiler_there_are_no_libraries_and_one_line_says_so(
    compiler: Compiler, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    build(folder, compiler, LEVELS)
    capfd.readouterr()
    assert build(folder, find_compiler("/bin/false"), LEVELS) == []
    assert present(folder) == set(), "nobody can tell what an older library was made from"
    said = capfd.readouterr()
    assert said.err == ""
    assert said.out.startswith("native: no working C++ compiler")
    assert said.out.count("\n") == 1


def test_a_command_without_output_is_no_compiler(folder: Path) -> None:
    assert build(folder, Compiler(("true",), ""), LEVELS) == []
    assert present(folder) == set()


@pytest.mark.usefixtures("compiler")
def test_as_a_script_it_builds_in_place_with_the_standard_library_alone(tree: Path) -> None:
    command = [sys.executable, "-I", "-S", "hatch_build.py"]
    first = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True)
    assert first.stdout.startswith("native: compiling portable")
    assert present(tree / hatch_build.FOLDER) == {*NAMES, hatch_build.RECORD}
    again = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True)
    assert again.stdout == ""


def hatchling_build(tree: Path, cxx: str, *arguments: str) -> None:
    """Let hatchling build something of the tree, with a compiler."""
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    command = [sys.executable, "-m", "hatchling", "build", *arguments]
    subprocess.run(command, cwd=tree, check=True, env={**os.environ, "CXX": cxx}, capture_output=True)


def packed(tree: Path, target: str, cxx: str) -> Path:
    """Build a distribution of the tree, and return its file."""
    hatchling_build(tree, cxx, "-t", target, "-d", str(tree.parent / target))
    (file,) = (tree.parent / target).iterdir()
    return file


def files_of(wheel: Path) -> list[str]:
    """Return what a wheel has in the package."""
    with zipfile.ZipFile(wheel) as file:
        return sorted(name for name in file.namelist() if name.startswith("quire/"))


def test_a_wheel_has_the_libraries_and_says_for_which_platform(compiler: Compiler, tree: Path) -> None:
    wheel = packed(tree, "wheel", " ".join(compiler.command))
    assert "-py3-none-" in wheel.name
    assert platform.machine() in wheel.name
    assert files_of(wheel) == sorted(["quire/__init__.py", *(f"quire/ops/native/{name}" for name in NAMES)])


def test_a_wheel_without_a_compiler_is_a_pure_one(tree: Path) -> None:
    wheel = packed(tree, "wheel", "/bin/false")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert files_of(wheel) == ["quire/__init__.py"]


def test_an_editable_install_builds_beside_the_sources(compiler: Compiler, tree: Path) -> None:
    hatchling_build(tree, " ".join(compiler.command), "-t", "wheel:editable", "--hooks-only")
    assert present(tree / hatch_build.FOLDER) == {*NAMES, hatch_build.RECORD}


def test_a_source_distribution_has_sources_and_no_libraries(compiler: Compiler, tree: Path) -> None:
    build(tree / hatch_build.FOLDER, compiler, LEVELS)
    unpacked = tree.parent / "unpacked"
    unpacked.mkdir()
    archive = packed(tree, "sdist", " ".join(compiler.command))
    subprocess.run(["tar", "-xzf", str(archive)], cwd=unpacked, check=True)
    (top,) = unpacked.iterdir()
    assert {path.name for path in (top / hatch_build.FOLDER).iterdir()} == {"kernels.cpp", "number.h"}
    wheel = packed(top, "wheel", " ".join(compiler.command))
    assert f"quire/ops/native/{NAMES[0]}" in files_of(wheel)
