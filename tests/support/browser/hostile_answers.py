"""Answers that try to run scripts, load something, or break the page that shows them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

# `OWN` sets a variable that tests look for, and {url} is the address of a server that counts its visitors.
OWN = "window.owned=1"
PAYLOADS = (
    f"<script>{OWN}</script>",
    f"</script><script>{OWN}</script>",
    f"<ScRiPt/x>{OWN}</sCrIpT >",
    "<script src={url}/x.js></script>",
    f"<img src=x onerror={OWN}>",
    f'<img src="{{url}}/a.png" onload="{OWN}">',
    "<img srcset='{url}/a.png 1x'>",
    f"<svg onload={OWN}>",
    f"<svg><script>{OWN}</script></svg>",
    "<svg><use href='{url}/a.svg#x'/></svg>",
    f"<svg><animate onbegin={OWN} attributeName=x dur=1s>",
    f"<math><mtext></mtext><mglyph><style></math><img src onerror={OWN}>",
    f"<iframe srcdoc='<script>parent.owned=1</script>'></iframe><iframe src=\"javascript:{OWN}\"></iframe>",
    "<iframe src={url}></iframe><object data={url}></object><embed src={url}>",
    f"<body onload={OWN}><input autofocus onfocus={OWN}>",
    f"<details open ontoggle={OWN}>x</details>",
    f"<video src={{url}}/a.mp4 onerror={OWN}></video><audio autoplay src={{url}}/a.mp3></audio>",
    "<meta http-equiv=refresh content='0;url={url}'>",
    "<base href={url}/><link rel=stylesheet href={url}/a.css><link rel=prefetch href={url}/p>",
    "<style>@import '{url}/a.css';*{{background:url({url}/b.png)}}</style>",
    "<p style='background:url({url}/c.png)'>x</p>",
    "<form action={url}><button autofocus>x</button></form><script>document.forms[0].submit()</script>",
    f"<template><script>{OWN}</script></template><noscript><img src={{url}}/n.png></noscript>",
    "<a href='{url}' ping='{url}/ping'>x</a><dialog open>x</dialog><marquee onstart=window.owned=1>x</marquee>",
    f"[x](javascript:{OWN})",
    f"[x](JaVaScRiPt:{OWN})",
    f"[x](\tjavascript:{OWN})",
    f"[x](<java\nscript:{OWN}>)",
    f"[x](java&Tab;script:{OWN})",
    f"[x](&#106;avascript:{OWN})",
    f"[x](vbscript:{OWN})",
    f"[x](data:text/html,<script>opener.{OWN}</script>)",
    f"[x](data:text/html;base64,PHNjcmlwdD5hbGVydCgxKTwvc2NyaXB0Pg==) <javascript:{OWN}>",
    f'[x]({{url}} "onmouseover={OWN}")',
    f'[x]({{url}}/"onmouseover="{OWN})',
    "[x](file:///etc/passwd) [y](//evil.example/x) [z](/v1/models) [s](blob:null/x) [f](filesystem:x)",
    "![x]({url}/image.png)",
    "![x](data:image/svg+xml,<svg onload=window.owned=1>)",
    f'![x](x" onerror="{OWN})',
    "![x][ref]\n\n[ref]: {url}/reference.png",
    f"[x][js]\n\n[js]: javascript:{OWN}",
    "[![x]({url}/inner.png)]({url}/outer)",
    "[https://bank.example](https://evil.example) https://bank.example@evil.example/ [x](https://раypal.example)",
    "```html\n<script>window.owned=1</script>\n",
    "````\n```\n<img src=x onerror=window.owned=1>\n```` x\n~~~",
    '```"><img src=x onerror=window.owned=1>\ncode\n```',
    "`<img src=x onerror=window.owned=1>",
    "| a | b |\n|---|---|\n| <img src={url}/t.png> | [x](javascript:window.owned=1) |\n| `|` ",
    "a" * 30_000,
    "[" * 3000 + "](x)" * 3000,
    "*" * 3000 + "a" + "**_" * 2000,
    "`" * 3000 + "a" + "``` `" * 1000,
    "> " * 2000 + "deep",
    "- " * 2000 + "deep",
    "".join("  " * depth + "- x\n" for depth in range(300)),
    "|" * 4000 + "\n" + "|-" * 4000 + "|\n" + "|x" * 4000,
    "| a | b |\n|---|---|\n" + "| x | y |\n" * 1500,
    "# " * 2000 + "\n" + "#" * 3000,
    "\\" * 5001 + "<b>",
    "&lt;script&gt;window.owned=1&lt;/script&gt; &#60;img src=x onerror=window.owned=1&#62;",
    "\u202eevitcaer\u202c \u2066https://evil.example\u2069 \u200b\u200d\ufeff[\u202emoc.elpmaxe](https://evil.example)",
    "\x00\x01\x1b[31mred\x1b[0m\x7f\x85\u2028\u2029\ufffe",
    "e\u0301\u0301" + "\u0301" * 3000 + " \U000e0041\U000e0042 👩‍👩‍👧‍👦" * 20,
    "__proto__ constructor prototype hasOwnProperty toString [__proto__](constructor) `__proto__`",
    '{{"__proto__": {{"owned": 1}}, "constructor": {{"prototype": {{"owned": 1}}}}}}',
    'data: [DONE]\n\ndata: {{"error":{{"message":"<img src=x onerror=window.owned=1>"}}}}\n\nid: x\n\n',
    "${{window.owned=1}} {{{{constructor.constructor('window.owned=1')()}}}} <%= x %>",
    "<!--<img src=x onerror=window.owned=1>--> <![CDATA[<script>window.owned=1</script>]]> <?xml ?>",
    "javascript:window.owned=1 https:// http://[ https://%zz http://a:b:c:99999 mailto: <mailto:x@y?body=%ff%fe>",
    "2147483648. x\n\n99999999999. y\n\n-1. z\n\n0. w",
)

_CUTS = (1, 3, 9, 40, 4000)  # characters of a piece


def hostile_answer(number: int, url: str) -> str:
    """Return a hostile answer, which depends only on `number`: first each payload, and then mixtures of them.

    url  the address of a server to which nothing may send a request
    """
    if number < len(PAYLOADS):
        return _filled(PAYLOADS[number], url)
    randomness = random.Random(number)
    parts = [randomness.choice(_VARIANTS)(_filled(randomness.choice(PAYLOADS), url), randomness) for _ in range(3)]
    return randomness.choice(("\n\n", "\n", " ", "")).join(parts)


def pieces(text: str, seed: int) -> Sequence[str]:
    """Return a text in pieces of random lengths, as a stream delivers it."""
    randomness = random.Random(seed)
    longest = randomness.choice(_CUTS) if len(text) < 5000 else _CUTS[-1]
    found, at = [], 0
    while at < len(text):
        size = randomness.randint(1, longest)
        found.append(text[at : at + size])
        at += size
    return found


def _filled(payload: str, url: str) -> str:
    return payload.replace("{url}", url).replace("{{", "{").replace("}}", "}")


def _indented(text: str, prefix: str) -> str:
    return "\n".join(prefix + line for line in text.split("\n"))


def _invisible(text: str, randomness: random.Random) -> str:
    """Return the text with characters that nobody sees or that reorder it."""
    letters = list(text[:500])
    for _ in range(5):
        letters.insert(randomness.randrange(len(letters) + 1), randomness.choice("\u200b\u200e\u202e\u2066\u00ad\0"))
    return "".join(letters)


_VARIANTS: tuple[Callable[[str, random.Random], str], ...] = (
    lambda text, _: text,
    lambda text, _: _indented(text, "> "),
    lambda text, _: "- " + _indented(text, "  ").lstrip(),
    lambda text, _: f"1. x\n   - {text}",
    lambda text, _: f"| {text} | b |\n|---|---|\n| {text} | {text} |",
    lambda text, _: f"**{text}** _{text}_ ~~{text}~~",
    lambda text, _: f"[{text}](https://example.com/{text})",
    lambda text, _: f"![{text}]({text})",
    lambda text, _: f"### {text}",
    lambda text, _: f"```{text}\n{text}",
    lambda text, _: f"`{text}`",
    lambda text, randomness: text[: randomness.randrange(len(text) + 1)],
    lambda text, randomness: "".join(randomness.choice((letter.upper(), letter)) for letter in text),
    lambda text, randomness: text.replace(" ", randomness.choice(("\t", "\n", "\f", "/", "\u00a0"))),
    _invisible,
)
