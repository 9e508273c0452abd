"""Addresses and certificates that cannot be used: the message names the option, the reason and what to do."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.server.http.address import bind, tls_context

OPENSSL = shutil.which("openssl")


def test_a_taken_port_says_what_to_do() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as refused:
            bind("127.0.0.1", port)
    assert refused.value.field == "port"
    assert str(refused.value) == (
        f"cannot listen on 127.0.0.1 port {port}: Address already in use; choose another port, 0 takes a free one"
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates and keys, good and bad ones."""
    folder = tmp_path_factory.mktemp("pem")

    def run(*words: str) -> None:
        subprocess.run([str(OPENSSL), *words], cwd=folder, check=True, capture_output=True)

    for name in ("a", "b"):
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", f"{name}.key")
        run("req", "-x509", *key, "-out", f"{name}.pem", "-days", "2", "-subj", "/CN=a")
    run("x509", "-in", "a.pem", "-outform", "der", "-out", "a.der")
    run("pkey", "-in", "a.key", "-aes128", "-passout", "pass:secret", "-out", "encrypted.key")
    (folder / "text").write_text("hello\n")
    (folder / "empty").write_text("")
    whole = (folder / "a.pem").read_text()
    (folder / "cut.pem").write_text(whole[: len(whole) // 2])
    (folder / "both.pem").write_text(whole + (folder / "a.key").read_text())
    return folder


@pytest.mark.skipif(OPENSSL is None, reason="no openssl here")
@pytest.mark.parametrize(
    ("certificate", "key", "field", "why"),
    [
        ("text", None, "ssl_certfile", "is no certificate in PEM"),
        ("empty", "a.key", "ssl_certfile", "is no certificate in PEM"),
        ("a.der", "a.key", "ssl_certfile", "is no certificate in PEM"),
        ("a.key", "a.key", "ssl_certfile", "is no certificate in PEM"),
        ("cut.pem", "a.key", "ssl_certfile", "the certificate or its key is damaged"),
        ("a.pem", None, "ssl_certfile", "has no private key: name its file with ssl_keyfile"),
        ("a.pem", "text", "ssl_keyfile", "is no private key in PEM"),
        ("a.pem", "a.pem", "ssl_keyfile", "is no private key in PEM"),
        ("a.pem", "b.key", "ssl_keyfile", "the private key is not the key of the certificate"),
        ("a.pem", "encrypted.key", "ssl_keyfile", "the private key is encrypted: decrypt it"),
        ("nothing", "a.key", "ssl_certfile", "cannot be read: No such file"),
        ("a.pem", "nothing", "ssl_keyfile", "cannot be read: No such file"),
        (".", "a.key", "ssl_certfile", "cannot be read: it is not a regular file"),
    ],
)
def test_files_that_are_no_certificate_or_key_are_named(
    certificate: str, key: str | None, field: str, why: str, files: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        tls_context(str(files / certificate), None if key is None else str(files / key))
    assert refused.value.field == field
    assert str(files / str(key if field == "ssl_keyfile" else certificate)) in str(refused.value)
    assert why in str(refused.value)
    assert "PEM lib" not in str(refused.value)


@pytest.mark.skipif(OPENSSL is None, reason="no openssl here")
@pytest.mark.parametrize(("certificate", "key"), [("a.pem", "a.key"), ("both.pem", None)])
def test_a_certificate_and_its_key_are_taken(certificate: str, key: str | None, files: Path) -> None:
    assert tls_context(str(files / certificate), None if key is None else str(files / key)) is not None
