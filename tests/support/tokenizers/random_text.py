"""Random strings that stress a tokenizer: every character class, malformed text, long runs, special tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

_WORDS = (
    *("the", "quick", "Brown", "fox", "don't", "I'll", "WE'RE", "you've", "12345", "3.14", "...", "!!!", "ſ", "'ſ"),
    *("http://x.y/z", "<html>", "</s>", "<s>", "<unk>", "<0x0A>", "def f(x):\n\treturn\u3000x+1\n", "▁", "Ġ", "Ċ"),
    *("é", "ñ", "İ", "ﬁ", "한국어", "русский", "ไทย", "עברית", "हिन्दी", "e\u0301", "\u00a0x"),
)
_SPACES = "\u0085\u00a0\u1680\u180e\u2003\u2028\u2029\u200b\u202f\u205f\u3000\ufeff"
_EMOJI = "😀👍🏽👩\u200d🚀🇩🇪"


def any_character(source: random.Random) -> str:
    """Return any Unicode code point except surrogates, assigned or not, in any plane."""
    while 0xD800 <= (code_point := source.randrange(0x110000)) < 0xE000:
        pass
    return chr(code_point)


def likely_character(source: random.Random) -> str:
    choice = source.random()
    if choice < 0.40:
        return source.choice("abcdefghijklmnopqrstuvwxyzABCXYZ")
    if choice < 0.50:
        return source.choice("'''sStTmMdDrReEvVlL")
    if choice < 0.60:
        return source.choice("  \t\n\r\v\f\n")
    if choice < 0.68:
        return source.choice("0123456789٠١٢½²ⅫⅣ〇一")
    if choice < 0.78:
        return chr(source.randrange(0x80))
    if choice < 0.86:
        return chr(source.choice([source.randrange(0x80, 0x370), source.randrange(0x4E00, 0x9FFF)]))
    if choice < 0.91:
        return source.choice(_SPACES + _EMOJI)
    return any_character(source)


def random_text(source: random.Random, special: Sequence[str] = ()) -> str:
    """Return a string of up to 12 parts. `special` strings may be truncated."""
    parts = []
    for _ in range(source.randrange(13)):
        choice = source.random()
        if choice < 0.5:
            parts.append("".join([likely_character(source) for _ in range(source.randrange(1, 8))]))
        elif choice < 0.75:
            parts.append(source.choice(_WORDS))
        elif choice < 0.85 and special:
            text = source.choice(special)
            parts.append(text if source.random() < 0.7 else text[: source.randrange(1, len(text) + 1)])
        elif choice < 0.93:
            parts.append(source.choice(" \n\t") * source.randrange(1, 30))
        else:
            parts.append(likely_character(source) * source.randrange(1, 60))
        if source.random() < 0.4:
            parts.append(" ")
    return "".join(parts)


def random_texts(seed: int, count: int, special: Sequence[str] = ()) -> Iterator[str]:
    source = random.Random(seed)
    return (random_text(source, special) for _ in range(count))


_PEOPLE = "👩👨🧑👶👮🏃💃🤦🙋"
_SKINS = "🏻🏼🏽🏾🏿"
_THINGS = "🚀💻🔬🎨🌾❤⚕✈🏳🏴☠🌈♂♀⚧"
_JOINER, _EMOJI_STYLE, _TEXT_STYLE, _KEYCAP = "\u200d", "\ufe0f", "\ufe0e", "\u20e3"


def emoji_sequence(source: random.Random) -> str:
    """Return one emoji sequence (joined, skin tone, flag, keycap, region flag) or a fragment of one."""
    kind = source.randrange(6)
    if kind == 0:
        parts = [source.choice(_PEOPLE) + source.choice(("", *_SKINS)) for _ in range(source.randrange(1, 5))]
        return _JOINER.join([*parts, source.choice(_THINGS)])
    if kind == 1:
        return source.choice(_PEOPLE) + source.choice(_SKINS)
    if kind == 2:
        return "".join([chr(0x1F1E6 + source.randrange(26)) for _ in range(source.randrange(1, 6))])
    if kind == 3:
        return source.choice("0123456789#*") + source.choice((_EMOJI_STYLE, _TEXT_STYLE, "")) + _KEYCAP
    if kind == 4:
        return (
            "🏴" + "".join([chr(0xE0000 + ord(letter)) for letter in source.choice(("gbeng", "gbsct"))]) + "\U000e007f"
        )
    return source.choice(_THINGS) + source.choice((_EMOJI_STYLE, _TEXT_STYLE, _JOINER))


def broken_text(source: random.Random) -> str:
    """Return text decoded from invalid UTF-8, with U+FFFD or lone surrogates for the bad bytes, or only surrogates."""
    kind = source.randrange(3)
    if kind == 0:
        return "".join([chr(source.randrange(0xD800, 0xE000)) for _ in range(source.randrange(1, 4))])
    good = "".join([likely_character(source) for _ in range(source.randrange(1, 8))]).encode()
    at = source.randrange(len(good) + 1)
    wrong = source.randbytes(source.randrange(1, 4))
    cut = source.randrange(3)
    data = good[:at] + wrong + good[min(at + cut, len(good)) :]
    return data.decode(errors="replace" if kind == 1 else "surrogateescape")


def harsh_text(source: random.Random, special: Sequence[str] = ()) -> str:
    """Return `random_text` mixed with emoji sequences and broken text."""
    parts = []
    for _ in range(source.randrange(1, 4)):
        choice = source.random()
        if choice < 0.6:
            parts.append(random_text(source, special))
        elif choice < 0.8:
            parts.append(emoji_sequence(source))
        else:
            parts.append(broken_text(source))
    return "".join(parts)


# At least one character of every class that a pre-tokenizer distinguishes.
_OF_EVERY_CLASS = (
    "aAbsStTrReEvVlLmMdD''   \t\n\r\n\x0b01239!,-/($^|&.…"
    "éÉЖжاก中一ぁア가ㄅ々豈龥ʰǅªµℵ！、。：“”²Ⅷ٣\u0301\u093c©€😀\ufe0f\u200d\u00a0\u3000\u0085\u2028\u061c\ufffd\U000e0041"
)


def text_of_every_class(source: random.Random) -> str:
    """Return short runs of characters of all classes in random order."""
    return "".join(
        [source.choice(_OF_EVERY_CLASS) * source.choice((1, 1, 1, 2, 3, 4)) for _ in range(source.randrange(25))]
    )


def edge_characters() -> str:
    """Return each character of `text_of_every_class` once."""
    return "".join(dict.fromkeys(_OF_EVERY_CLASS))
