"""Requests that are odd as HTTP: their heads, or all of them."""

from __future__ import annotations

from random import Random

PATHS = ("/", "/health", "/metrics", "/status", "/kv", "/version", "/v1/models", "/v1/models/x", "/nothing")
TARGETS = (
    *(
        "/v1//completions",
        "//",
        "/../../etc/passwd",
        "/%2e%2e/",
        "/%00",
        "/v1/models/" + "x" * 5000,
        "/?" + "a=b&" * 999,
    ),
    *("http://evil.example/version", "*", "/version/", "/v1/models/%ff", "/v1/models/../../x", "/#x", "/\\", "/;x"),
)
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "get", "X" * 100, "PRI")
ODD_HEADERS = (
    "Authorization: Basic \xe9",
    "Authorization: Bearer",
    "Authorization: Basic ====",
    "Authorization: " + "x" * 10_000,
    "Accept-Encoding: gzip, br",
    "Content-Encoding: gzip",
    "Expect: 100-continue",
    "Expect: x",
    "Connection: upgrade\r\nUpgrade: websocket",
    "Connection: upgrade\r\nUpgrade: h2c",
    "Connection: close, keep-alive",
    "Cookie: " + "a=b;" * 2000,
    "Origin: https://evil.example",
    "Origin: null",
    "X-Request-Id: ../../x",
    "X-Forwarded-For: 127.0.0.1",
    "X-Tenant: \xff\xfe",
    "Range: bytes=0-",
    "If-None-Match: *",
    "Transfer-Encoding: identity",
    "TE: trailers",
    "Trailer: x",
    "A: b\r\n c",
    ": x",
    "x",
    "A\0: b",
    "A: \0",
    "\u20ac".encode().decode("latin-1") + ": x",
    "Accept: " + ", ".join(["*/*;q=0.1"] * 500),
)
TYPES = (
    "application/json",
    "application/json; charset=utf-16",
    "text/plain",
    "",
    "APPLICATION/JSON",
    "a/b;" * 99,
    "\xff",
)
HOSTS = ("localhost", "LOCALHOST.", "127.0.0.1:1", "[::1]", "evil.example", "[", "", "localhost:x", "a" * 3000, "\xe9")


def head(path: str, body: bytes) -> bytes:
    """Return the usual head of a request."""
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    return "\r\n".join((*lines, "Connection: close", "", "")).encode()


def odd_head(rng: Random, path: str, body: bytes) -> bytes:
    """Return the head of a request that has a body of this length, and something odd beside it."""
    lines = [f"POST {path} HTTP/1.1", f"Host: {rng.choice(HOSTS) if rng.random() < 0.3 else 'localhost'}"]
    lines.append(f"Content-Type: {rng.choice(TYPES) if rng.random() < 0.3 else 'application/json'}")
    lines += rng.sample(ODD_HEADERS, rng.choice([0, 1, 1, 2]))
    if rng.random() < 0.1:
        lines += [f"X-{idx}: y" for idx in range(rng.choice([100, 1000, 5000]))]
    if rng.random() < 0.05:
        lines.append("X-Long: " + "x" * rng.choice([8000, 60_000, 1_000_000]))
    lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join((*lines, "Connection: close", "", "")).encode("latin-1")


def chunked(rng: Random, path: str, body: bytes) -> bytes:
    """Return a request whose body is sent in chunks, of some bytes each or of one."""
    lines = f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", "Transfer-Encoding: chunked"
    size = rng.choice([1, 7, 100, 1000, 65536])
    chunks = [body[start : start + size] for start in range(0, len(body), size)]
    parts = [b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks]
    return "\r\n".join((*lines, "Connection: close", "", "")).encode() + b"".join(parts) + b"0\r\n\r\n"


def bare(rng: Random) -> tuple[bytes, bool]:
    """Return bytes that may be a request, and whether an answer must come."""
    kind = rng.randrange(8)
    if kind == 0:
        target = rng.choice(TARGETS + PATHS)
        line = f"{rng.choice(METHODS)} {target} HTTP/{rng.choice(['1.1', '1.1', '1.0', '1.2', '0.9', '2.0', 'x'])}"
        return f"{line}\r\nHost: {rng.choice(HOSTS)}\r\nConnection: close\r\n\r\n".encode("latin-1"), True
    if kind == 1:
        return rng.randbytes(rng.randint(1, 2000)) + b"\r\n\r\n", True
    if kind == 2:
        # Cut off somewhere: the client has gone.
        raw = head("/v1/completions", b'{"prompt":"Z"}') + b'{"prompt":"Z"}'
        return raw[: rng.randrange(1, len(raw))], False
    if kind == 3:
        lengths = rng.choice(["5\r\nContent-Length: 6", "-1", "+5", "0x5", "9" * 30, "5, 6", "", "\u00b2", "1e3"])
        start = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: {lengths}\r\n\r\n"
        return start.encode("latin-1", "replace"), True
    if kind == 4:
        chunks = rng.choice(
            [b"-1\r\n", b"zz\r\n", b"5\r\nab\r\n0\r\n\r\n", b"fffffffffffffffff\r\n", b"2\nab\n0\n\n", b"5;" * 9999]
        )
        both = rng.choice([b"", b"Content-Length: 2\r\n"])
        method = rng.choice([b"POST", b"POST", b"HEAD", b"GET"])
        begin = method + b" /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        return begin + both + b"Transfer-Encoding: chunked\r\n\r\n" + chunks, False
    if kind == 5:
        one = f"GET {rng.choice(PATHS)} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        return one * rng.choice([2, 10, 100]) + b"x" * rng.choice([0, 1, 100]), False
    if kind == 6:
        # A request that is refused, and a good one behind it on the same connection.
        bad = rng.choice([b"{", b"[]", b'{"prompt":1}', b'{"prompt":"' + b"Z" * 9000 + b'"}'])
        path = rng.choice(["/tokenize", "/v1/completions", "/nothing"])
        refused = head(path, bad).replace(b"Connection: close\r\n", b"") + bad
        good = b'{"prompt":"Z"}'
        return refused + head("/tokenize", good) + good, True
    mutated = bytearray(head("/tokenize", b'{"prompt":"Z"}') + b'{"prompt":"Z"}')
    for _ in range(rng.choice([1, 2, 5])):
        mutated[rng.randrange(len(mutated))] = rng.randrange(256)
    return bytes(mutated), False
