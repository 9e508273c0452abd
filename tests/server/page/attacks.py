"""Texts with which a model, or a page that it read, may try to run code, to load something or to mislead."""

from __future__ import annotations

_RUN = "alert(1)"
_ADDRESSES = (
    f"javascript:{_RUN}",
    f"JaVaScRiPt:{_RUN}",
    f"java\tscript:{_RUN}",
    f"&#106;avascript:{_RUN}",
    f"javascript&colon;{_RUN}",
    f"\x01javascript:{_RUN}",
    f"%6aavascript:{_RUN}",
    f"javascript://example.org/%0a{_RUN}",
    f"data:text/html,<script>{_RUN}</script>",
    "data:text/html;base64,PHNjcmlwdD5hbGVydCgxKTwvc2NyaXB0Pg==",
    f"vbscript:{_RUN}",
    "file:///etc/passwd",
    "blob:https://example.org/x",
    "//example.org/x",
    "https:javascript:alert(1)",
    "/reset_prefix_cache",
)
_LINKS = ("[x]({})", "<{}>", "[x]: {}\n\n[x]", "![x]({})", "{}")
_MARKUP = (
    f"<script>{_RUN}</script>",
    f"<ScRiPt src=//example.org/x.js></ScRiPt{_RUN}>",
    f"<img src=x onerror={_RUN}>",
    f"<svg onload={_RUN}><animate onbegin={_RUN} attributeName=x></svg>",
    f'<iframe srcdoc="<script>{_RUN}</script>"></iframe>',
    f"<details open ontoggle={_RUN}>",
    f"<a href='javascript:{_RUN}'>x</a>",
    f"<math><mtext><a xlink:href='javascript:{_RUN}'>x</a></mtext></math>",
    "<style>body{display:none}</style>",
    "<link rel=stylesheet href=//example.org/x.css>",
    "<meta http-equiv=refresh content='0;url=//example.org'>",
    f"<form action=javascript:{_RUN}><button>x</button></form>",
    "<base href=//example.org/>",
    f"<!--><img src=x onerror={_RUN}>-->",
    f"<![CDATA[><img src=x onerror={_RUN}>]]>",
    f"<?x ><img src=x onerror={_RUN}>",
    f"</div></section><img src=x onerror={_RUN}>",
    f"&lt;img src=x onerror={_RUN}&gt;",
    f"<noscript><p title='</noscript><img src=x onerror={_RUN}>'>",
)
_PLACES = ("{}", "- {}", "> {}", "# {}", "| a |\n|---|\n| {} |", "[x](https://example.org '{}')", "[{}](https://a.b)")
_LATEX = (
    rf"\href{{javascript:{_RUN}}}{{x}}",
    rf"\url{{javascript:{_RUN}}}",
    r"\includegraphics{https://example.org/x.png}",
    rf"\htmlData{{onclick={_RUN}}}{{x}}",
    r"\class{with-library}{x}",
    r"\id{send}{x}",
    r"\style{position:fixed;inset:0}{x}",
    r"\cssId{send}{x}",
    r"\color{url(//example.org/x)}x",
    r"\textcolor{red;background:url(//example.org/x)}{x}",
    r"\colorbox{expression(alert(1))}{x}",
    r"\def\x{\x\x}\x",
    r"\rule{99999em}{99999em}",
    r"\text{<img src=x onerror=alert(1)>}",
    r"\unicode{<script>alert(1)</script>}",
    "{" * 400 + "x" + "}" * 400,
    r"\begin{array}{" + "c" * 200 + "}x",
)

ATTACKS = [
    *(form.format(address) for address in _ADDRESSES for form in _LINKS),
    *(place.format(markup) for markup in _MARKUP for place in _PLACES[: 1 if len(markup) > 60 else None]),
    *(f"{opened}{latex}{closed}" for latex in _LATEX for opened, closed in (("$", "$"), ("$$", "$$"), (r"\(", r"\)"))),
    f"```html\n{_MARKUP[0]}\n```",
    f'```"><img src=x onerror={_RUN}>\nx\n```',
    f"`{_MARKUP[2]}`",
    "[" * 300 + "x",
    "> " * 300 + "x",
    "*" * 400 + "x",
    "[https://bank.example](https://example.org)",
]
