"""Markdown and LaTeX of answers as elements: what people expect to see, and nothing that a model's text could do."""

from __future__ import annotations

import re

import pytest

from tests.server.conftest import KEY
from tests.server.page.attacks import ATTACKS
from tests.server.page.browser import Browser
from tests.server.process import ServerProcess

pytestmark = pytest.mark.slow

LINK = '<a href="{0}" target="_blank" rel="noreferrer noopener nofollow" title="{0}">{1}</a>'
TASK = '<li class="task"><input type="checkbox" disabled="" {}="{}">{}</li>'
# Markdown and the elements that it becomes.
SHOWN = {
    "a *b* **c** ~~d~~ `e`": "<p>a <em>b</em> <strong>c</strong> <s>d</s> <code>e</code></p>",
    "one\ntwo\n\nthree": "<p>one<br>two</p><p>three</p>",
    "# One\n## Two\n###### Six": "<h3>One</h3><h4>Two</h4><h6>Six</h6>",
    "- a\n  - b\n    - c\n- d": "<ul><li>a<ul><li>b<ul><li>c</li></ul></li></ul></li><li>d</li></ul>",
    "1. x\n\n2. y": "<ol><li><p>x</p></li><li><p>y</p></li></ol>",
    "3. x\n4. y": '<ol start="3"><li>x</li><li>y</li></ol>',
    "1. x\n   more\n2. y": "<ol><li>x<br>more</li><li>y</li></ol>",
    "- [ ] a\n- [x] b": f"<ul>{TASK.format('aria-label', 'to do', 'a')}{TASK.format('aria-label', 'done', 'b')}</ul>",
    "> a\n> > b": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>",
    "---": "<hr>",
    r"\*stars\* \# \[x\](y)": "<p>*stars* # [x](y)</p>",
    "&amp; &lt; &copy; &#65;": "<p>&amp; &lt; © A</p>",
    "a<br>b <b>c</b>": "<p>a<br>b &lt;b&gt;c&lt;/b&gt;</p>",
    "| a | b |\n|:-:|--:|\n| `x\\|y` | 2 |": (
        '<div class="scroll" tabindex="0"><table><thead><tr><th style="text-align: center;">a</th>'
        '<th style="text-align: right;">b</th></tr></thead><tbody><tr><td style="text-align: center;">'
        '<code>x|y</code></td><td style="text-align: right;">2</td></tr></tbody></table></div>'
    ),
    "[a](https://example.org/b)": (
        f'<p>{LINK.format("https://example.org/b", "a")}<span class="address"> (https://example.org/b)</span></p>'
    ),
    "see https://example.org/b.": f"<p>see {LINK.format('https://example.org/b', 'https://example.org/b')}.</p>",
    "README.md and example.org": "<p>README.md and example.org</p>",
    "[mail](mailto:a@b.c) [near](/kv)": "<p>[mail](mailto:a@b.c) [near](/kv)</p>",
    "![p](https://example.org/p.png)": (
        f"<p><span>{LINK.format('https://example.org/p.png', 'p')}"
        '<span class="address"> (https://example.org/p.png)</span></span></p>'
    ),
    "$x^2$": "<p><math><msup><mi>x</mi><mn>2</mn></msup></math></p>",
    "it costs $5 or $10, not $ 3": "<p>it costs $5 or $10, not $ 3</p>",
    r"costs \$5 and \$6": "<p>costs $5 and $6</p>",
    "`$x$`": "<p><code>$x$</code></p>",
    r"\(a_1\)": "<p><math><msub><mi>a</mi><mn>1</mn></msub></math></p>",
    r"$\nonsense{$": r"<p><code>\nonsense{</code></p>",
}
# LaTeX, and names of elements of MathML that it needs.
FORMULAS = {
    r"\frac{1}{2}": {"mfrac"},
    r"\sqrt[3]{x}": {"mroot"},
    r"\sum_{i=0}^n i \underbrace{ab}_{c}": {"munder"},
    r"\int_0^1 f": {"msubsup"},
    r"\alpha \le \Omega": {"mi", "mo"},
    r"\begin{pmatrix}1 & 2\\3 & 4\end{pmatrix}": {"mtable", "mtr", "mtd"},
    r"\begin{cases}1 & x>0\\0 & \text{else}\end{cases}": {"mtable", "mtext"},
    r"\begin{aligned}a &= b\\ &= c\end{aligned}": {"mtable"},
    r"\hat{x} \vec{v} \overline{ab}": {"mover"},
    r"\mathbb{R} \mathcal{L} \operatorname{argmax}": {"mi"},
}


@pytest.fixture
def page(browser: Browser, bundled: ServerProcess) -> tuple[Browser, str]:
    browser.show_as(is_phone=False, is_dark=False)
    browser.open_page(bundled.url, key=KEY)
    return browser, bundled.url


def test_markdown_becomes_the_elements_that_it_names(page: tuple[Browser, str]) -> None:
    browser, url = page
    shown: list[str] = browser.check("shown(...arguments)", url, [*SHOWN])
    assert dict(zip(SHOWN, shown, strict=True)) == SHOWN


def test_a_list_holds_code_and_the_text_behind_it(page: tuple[Browser, str]) -> None:
    browser, url = page
    text = "1. a\n\n   ```python\n   def f():\n       return 1\n   ```\n   b\n2. c"
    (html,) = browser.check("shown(...arguments)", url, [text])
    code = '<pre tabindex="0"><code><span class="word">def</span> f():\n    <span class="word">return</span>'
    first = rf"<li><p>a</p><div.*{re.escape(code)}.*</div><p>b</p></li>"
    assert re.fullmatch(rf"<ol>{first}<li><p>c</p></li></ol>", html, re.DOTALL)


def test_latex_becomes_mathml(page: tuple[Browser, str]) -> None:
    browser, url = page
    for form in ("${}$", "$$\n{}\n$$", r"\[ {} \]", "text $${}$$ text"):
        texts = [form.replace("{}", formula, 1) for formula in FORMULAS]
        shown = browser.check("shown(...arguments)", url, texts)
        for text, html, names in zip(texts, shown, FORMULAS.values(), strict=True):
            assert all(f"<{name}" in html for name in names), (text, html)
            assert ('display="block"' in html) == (form != "${}$"), text


def test_what_stays_the_same_while_a_text_grows_stays_the_same_element(page: tuple[Browser, str]) -> None:
    browser, url = page
    script = """
    return import(arguments[0] + '/page/chat/markdown.js').then(({ show }) => {
      const box = document.createElement('div');
      show(box, '# a\\n\\nb');
      const [first, second] = box.children;
      show(box, '# a\\n\\nb c\\n\\n- d');
      return [box.children[0] === first, box.children[1] === second, box.textContent, box.children.length];
    });
    """
    assert browser.run(script, url) == [True, False, "ab cd", 3]


def test_no_text_of_a_model_runs_loads_or_leads_astray(page: tuple[Browser, str]) -> None:
    browser, url = page
    browser.run("window.hits = []; window.alert = (what) => window.hits.push(String(what));")
    browser.run("addEventListener('securitypolicyviolation', (event) => window.hits.push(event.violatedDirective))")
    # A click must not open a tab; what it would open is what the href allows.
    browser.run("addEventListener('click', (event) => { if (event.target.closest('a')) event.preventDefault(); })")
    assert browser.check("notAllowed(...arguments)", url, ATTACKS) == []
    assert browser.run("return window.hits") == []
    assert browser.run("return location.href") == f"{url}/"
