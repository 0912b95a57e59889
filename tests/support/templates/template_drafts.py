"""Random chat templates: programs that use the whole language with huge numbers, and mutations of real templates.

A seed and a case number always give the same template, so these two numbers are enough to reproduce a failure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from random import Random

LARGE = ("400000000", "99999", "-99999", "7**(10**7)", "2**62", "10**9", "65536", "1e308", "-1", "4096", "9999999")
SMALL = ("0", "1", "2", "3", "-1", "7", "1.5", "10", "true")
TEXTS = ("''", "'a'", "' b c '", "'<|x|>'", "'é🙂'", "'a,b,c'", "'x\\n y\\n'", "'Ab ab'", "'12'", "'<b>'", "'1.5'")
LARGE_TEXTS = ("('a' * 9999999)", "('a\\n' * 99999)", "('🙂' * 999999)", "('ab ' * 999999)", "('<' * 99999)")
FORMATS = ("'%s'", "'%5s|%s'", "'%d'", "'%(a)s'", "'%r'", "'%%'", "'%-5.1f'")
LARGE_FORMATS = ("'%400000000d'", "'%*d'", "'%.99999999f'", "('%s' * 9999)", "('%(a)s' * 99999)", "'%(a)99999s'")
BRACES = ("'{}'", "'{0}-{0}'", "'{:>5}'", "'{a}'", "'{!r}'", "'{0[0]}'", "'{:.1f}'")
LARGE_BRACES = ("'{:400000000}'", "'{:{}}'", "('{0}' * 99999)", "'{:.99999999f}'", "('{}' * 9999)", "'{0:0>999999}'")


# Filters and methods by argument and result type. `#` is a number, `$` a text, `@` a list, `&` a dict and `?` anything.
TEXT_TO_TEXT = [
    "|capitalize",
    "|center(#)",
    "|d($)",
    "|e",
    "|escape",
    "|first",
    "|indent(#)",
    "|indent($,true,true)",
    "|last",
    "|lower",
    "|replace($,$)",
    "|replace($,$,#)",
    "|reverse",
    "|safe",
    "|string",
    "|title",
    "|trim",
    "|trim($)",
    "|truncate(#)",
    "|truncate(#,true,$)",
    "|upper",
    "|tojson",
    "|join($)",
    ".capitalize()",
    ".casefold()",
    ".center(#)",
    ".center(#,'x')",
    ".expandtabs(#)",
    ".join(@)",
    ".ljust(#)",
    ".lower()",
    ".lstrip($)",
    ".removeprefix($)",
    ".removesuffix($)",
    ".replace($,$)",
    ".replace($,$,#)",
    ".rjust(#)",
    ".rstrip()",
    ".strip($)",
    ".swapcase()",
    ".title()",
    ".upper()",
    ".zfill(#)",
    "[#:#]",
    "[::-1]",
    "[#:]",
    ".format(?)",
    "[#]",
]
TEXT_TO_NUMBER = [
    "|count",
    "|length",
    "|wordcount",
    "|int",
    "|int(#)",
    "|float",
    ".count($)",
    ".find($)",
    ".index($)",
    ".rfind($)",
    ".rindex($)",
    ".startswith($)",
    ".endswith($)",
    ".isalpha()",
    ".isdigit()",
    ".isspace()",
    ".islower()",
]
TEXT_TO_LIST = [
    "|list",
    "|batch(#)|list",
    "|slice(#)|list",
    "|unique|list",
    "|sort",
    "|map('upper')|list",
    ".split()",
    ".split($)",
    ".split($,#)",
    ".rsplit($)",
    ".rsplit($,#)",
    ".splitlines()",
    ".partition($)",
    ".rpartition($)",
    "|select('in',$)|list",
]
NUMBER_TO_NUMBER = ["|abs", "|round", "|round(#)", "|round(#,'ceil')", "|int", "|float", "|d(#)"]
LIST_TO_LIST = [
    "|list",
    "|sort",
    "|sort(true)",
    "|unique|list",
    "|reverse|list",
    "|batch(#)|list",
    "|batch(#,$)|list",
    "|slice(#)|list",
    "|slice(#,$)|list",
    "|map('string')|list",
    "|map('length')|list",
    "|map('default',$)|list",
    "|select('string')|list",
    "|reject('string')|list",
    "|select|list",
    "|map(attribute=#)|list",
    "|map('tojson')|list",
    "[#:#]",
    "[::#]",
    "|select('==',?)|list",
    "|groupby(#)",
    ".copy()",
]
LIST_TO_TEXT = ["|join", "|join($)", "|join($,#)", "|tojson", "|tojson(indent=#)", "|string"]
LIST_TO_NUMBER = ["|length", "|count", "|sum", "|first|length", ".index(?)", ".count(?)"]
LIST_TO_ANYTHING = ["|first", "|last", "|max", "|min", "|sum(start=@)", "[#]"]
DICT_TO_LIST = [
    "|list",
    "|items|list",
    "|dictsort",
    "|dictsort(true,'value',true)",
    ".items()|list",
    ".keys()|list",
    ".values()|list",
]
DICT_TO_ANYTHING = [
    ".a",
    ".b",
    "['a']",
    "[$]",
    ".get('a')",
    ".get($,?)",
    "|length",
    "|tojson",
    "|tojson(sort_keys=true)",
]
OF_MESSAGES = [
    "|selectattr('role','equalto','user')|list",
    "|rejectattr('content','string')|list",
    "|map(attribute='role')|list",
    "|groupby('role')",
    "|map(attribute='content')|list",
    "|sort(attribute='role')",
    "|unique(attribute='role')|list",
    "[0]",
    "[#]",
    "[1:]",
    "|map(attribute='nothing',default=$)|list",
    "|selectattr('nothing')|list",
    "|tojson(indent=#)",
    "[0].role",
    "[1].content",
    "[-1]",
]
CHECKS = [
    "boolean",
    "callable",
    "defined",
    "divisibleby(#)",
    "eq(?)",
    "even",
    "false",
    "float",
    "ge(#)",
    "in(@)",
    "integer",
    "iterable",
    "lower",
    "lt(#)",
    "mapping",
    "ne(?)",
    "none",
    "number",
    "odd",
    "sameas(?)",
    "sequence",
    "string",
    "true",
    "undefined",
    "upper",
    "escaped",
]
REFUSED = [
    "|pprint",
    "|random",
    "|xmlattr",
    "|attr($)",
    "|urlize",
    "|wordwrap(#)",
    "|striptags",
    ".items",
    ".strip",
    ".append(?)",
    ".pop()",
    ".update(&)",
    ".__class__",
    ".encode()",
    ".translate(&)",
    ".clear()",
    ".format_map(&)",
]
_HOLE = re.compile(r"[#$@&?]")
_NUMBER = re.compile(r"(?<![\w.'])\d+(?![\w.'])")
_TAG = re.compile(r"\{%-? set [^%}]*=[^%}]*%\}|\{\{[^{}]*\}\}")  # statements that can be removed or duplicated


class Draft:
    """A generator of one random template.

    numbers, texts, formats, braces  pools of literals; with small ones, most templates run
    surprise                         probability of using a value of the wrong type
    refused                          probability of using something that the sandbox does not offer
    """

    def __init__(
        self,
        random: Random,
        numbers: Sequence[str] = SMALL,
        texts: Sequence[str] = TEXTS,
        formats: Sequence[str] = FORMATS,
        braces: Sequence[str] = BRACES,
        loops: Sequence[str] = ("3", "1"),
        surprise: float = 0.004,
        refused: float = 0.0,
    ) -> None:
        self._random = random
        self._numbers = numbers
        self._texts = texts
        self._formats = formats
        self._braces = braces
        self._loops = loops
        self._surprise = surprise
        self._refused = refused

    def template(self) -> str:
        body = "".join(self.statement(3) for _ in range(self._random.randint(1, 4)))
        return (
            "{% set ns = namespace(a='a', b=['b'], n=1) %}{% set x = 'x y' %}{% set l = [3, 1, 2] %}"
            "{% set d = {'a': 1, 'b': 'c'} %}" + body
        )

    # --- statements

    def statement(self, depth: int) -> str:
        kinds: list[Callable[[int], str]] = [
            *[lambda depth: "{{ " + self.anything(depth) + " }}"] * 4,
            *[self._set] * 3,
            *[self._loop] * 2,
            *[self._condition] * 2,
            lambda depth: f"{{% set x %}}{self._body(depth)}{{% endset %}}",
            lambda depth: (
                f"{{% filter {self._random.choice(('upper', 'trim', 'indent', 'e'))} %}}"
                f"{self._body(depth)}{{% endfilter %}}"
            ),
            lambda depth: f"{{% with x = {self.text(depth)} %}}{self._body(depth)}{{% endwith %}}",
            self._macro,
            self._call_block,
            self._recursive_loop,
            lambda _: self._random.choice(("abc\n", "  ", "<|im_start|>", "é")),
        ]
        return self._random.choice(kinds)(depth) if depth > 0 else "{{ " + self.text(1) + " }}"

    def _body(self, depth: int) -> str:
        return "".join(self.statement(depth - 1) for _ in range(self._random.randint(1, 2)))

    def _set(self, depth: int) -> str:
        choices = (
            lambda: f"x = {self.text(depth)}",
            lambda: f"l = {self.items(depth)}",
            lambda: f"d = {self.mapping(depth)}",
            lambda: f"ns.a = ns.a ~ {self.text(depth)}",
            lambda: f"ns.b = ns.b + {self.items(depth)}",
            lambda: f"ns.b = [ns.b, {self.anything(depth)}]",
            lambda: f"ns.n = {self.number(depth)}",
        )
        return f"{{% set {self._random.choice(choices)()} %}}"

    def _loop(self, depth: int) -> str:
        ranged = f"range({self._random.choice(self._loops)})"
        items = self._random.choice((ranged, ranged, "messages", self.items(depth - 1), "d", "x"))
        test = self._random.choice(("", "", f" if {self.flag(1)}"))
        extra = self._random.choice(("", "", "break", "continue", "else", "loop"))
        ending = {
            "break": f"{{% if {self.flag(1)} %}}{{% break %}}{{% endif %}}",
            "continue": f"{{% if {self.flag(1)} %}}{{% continue %}}{{% endif %}}{{{{ m }}}}",
            "else": f"{{% else %}}{self._body(depth - 1)}",
            "loop": "{{ loop.index }}{{ loop.last }}{{ loop.length }}{{ loop.cycle('a', 'b') }}{{ loop.changed(m) }}",
        }.get(extra, "")
        return f"{{% for m in {items}{test} %}}{self._body(depth)}{ending}{{% endfor %}}"

    def _recursive_loop(self, depth: int) -> str:
        again = self._random.choice(
            ("[]", "[]", f"range(2) if loop.depth < {self._random.choice(self._loops)} else []", "[m]")
        )
        return f"{{% for m in {self.items(1)} recursive %}}{self._body(depth - 1)}{{{{ loop({again}) }}}}{{% endfor %}}"

    def _condition(self, depth: int) -> str:
        return f"{{% if {self.flag(2)} %}}{self._body(depth)}{{% else %}}{self._body(depth)}{{% endif %}}"

    def _macro(self, depth: int) -> str:
        name = self._random.choice(("f", "g"))
        again = self._random.choice(("", "", "", f"{{{{ {name}({self.text(1)}) }}}}"))
        return (
            f"{{% macro {name}(x, n={self.number(1)}) %}}{self._body(depth)}{again}{{% endmacro %}}"
            f"{{{{ {name}({self.text(1)}) }}}}"
        )

    def _call_block(self, depth: int) -> str:
        return (
            f"{{% macro h() %}}{self._body(depth - 1)}{{{{ caller({self.text(1)}) }}}}{{% endmacro %}}"
            f"{{% call(x) h() %}}{self._body(depth - 1)}{{% endcall %}}"
        )

    # --- expressions by result type

    def anything(self, depth: int) -> str:
        kinds = (self.text, self.number, self.items, self.mapping, self.flag, self._odd_one)
        return self._random.choice(kinds)(depth)

    def text(self, depth: int) -> str:
        if self._surprised() or depth <= 0:
            return self._leaf(self._texts, ("x", "bos_token", "ns.a", "messages[1].content"), depth)
        kinds: tuple[Callable[[], str], ...] = (
            lambda: self._applied(self.text, TEXT_TO_TEXT, depth),
            lambda: self._applied(self.text, TEXT_TO_TEXT, depth),
            lambda: self._applied(self.items, LIST_TO_TEXT, depth),
            lambda: f"({self.text(depth - 1)} ~ {self.anything(depth - 1)})",
            lambda: f"({self.text(depth - 1)} + {self.text(depth - 1)})",
            lambda: f"({self.text(depth - 1)} * {self._number()})",
            lambda: f"({self._random.choice(self._formats)} % {self._random.choice((self._given(depth), 'd', 'l'))})",
            lambda: f"({self._random.choice(self._formats)}|format({self._given(depth)}))",
            lambda: f"({self._random.choice(self._braces)}.format({self._given(depth)}))",
            lambda: f"({self._random.choice(self._braces)}.format({self._given(depth)}, {self._given(depth)}, a=1))",
            lambda: f"({self.text(depth - 1)} if {self.flag(depth - 1)} else {self.text(depth - 1)})",
        )
        return self._random.choice(kinds)()

    def number(self, depth: int) -> str:
        if self._surprised() or depth <= 0:
            return self._leaf(self._numbers, ("ns.n", "l[0]"), depth)
        kinds: tuple[Callable[[], str], ...] = (
            lambda: self._applied(self.text, TEXT_TO_NUMBER, depth),
            lambda: self._applied(self.items, LIST_TO_NUMBER, depth),
            lambda: self._applied(self.number, NUMBER_TO_NUMBER, depth),
            lambda: f"({self.number(depth - 1)} {self._random.choice('+-*/%')} {self.number(depth - 1)})",
            lambda: f"({self.number(depth - 1)} {self._random.choice(('//', '**'))} {self._number()})",
            lambda: f"(-{self.number(depth - 1)})",
        )
        return self._random.choice(kinds)()

    def items(self, depth: int) -> str:
        if self._surprised() or depth <= 0:
            return self._leaf(("[]", "[1, 2]", "['b', 'a']", "[[1], [2]]"), ("l", "messages", "ns.b", "tools"), depth)
        kinds: tuple[Callable[[], str], ...] = (
            lambda: self._applied(self.items, LIST_TO_LIST, depth),
            lambda: self._applied(self.items, LIST_TO_LIST, depth),
            lambda: self._applied(self.text, TEXT_TO_LIST, depth),
            lambda: self._applied(self.mapping, DICT_TO_LIST, depth),
            lambda: self._applied(lambda _: "messages", OF_MESSAGES, depth),
            lambda: f"[{self.anything(depth - 1)}, {self.anything(depth - 1)}]",
            lambda: f"({self.text(depth - 1)}, {self.text(depth - 1)})",
            lambda: f"({self.items(depth - 1)} + {self.items(depth - 1)})",
            lambda: f"({self.items(depth - 1)} * {self._number()})",
            lambda: f"(range({self._random.choice(self._loops)})|list)",
        )
        return self._random.choice(kinds)()

    def mapping(self, depth: int) -> str:
        if self._surprised() or depth <= 0:
            return self._leaf(("{}", "{'a': 'b'}", "{'b': 2, 'a': [1]}"), ("d", "messages[0]", "tools[0]"), depth)
        kinds: tuple[Callable[[], str], ...] = (
            lambda: f"{{'a': {self.anything(depth - 1)}, {self.text(depth - 1)}: {self.anything(depth - 1)}}}",
            lambda: f"dict({self.mapping(depth - 1)}, a={self.anything(depth - 1)})",
            lambda: f"dict([({self.text(0)}, {self.anything(depth - 1)})])",
        )
        return self._random.choice(kinds)()

    def flag(self, depth: int) -> str:
        if depth <= 0:
            return self._random.choice(("true", "false", "add_generation_prompt"))
        order = self._random.choice(("==", "!=", "<", ">", "<=", ">="))
        check = self._filled(self._random.choice(CHECKS), depth)
        negated = self._random.choice(("is", "is not"))
        kinds: tuple[Callable[[], str], ...] = (
            lambda: f"({self.anything(depth - 1)} {negated} {check})",
            lambda: f"({self.number(depth - 1)} {order} {self.number(depth - 1)})",
            lambda: f"({self.text(depth - 1)} {order} {self.text(depth - 1)})",
            lambda: f"({self.items(depth - 1)} {self._random.choice(('==', '!='))} {self.items(depth - 1)})",
            lambda: f"({self.text(depth - 1)} {self._random.choice(('in', 'not in'))} {self.text(depth - 1)})",
            lambda: f"({self.anything(depth - 1)} in {self.items(depth - 1)})",
            lambda: f"(not {self.flag(depth - 1)})",
            lambda: f"({self.flag(depth - 1)} {self._random.choice(('and', 'or'))} {self.flag(depth - 1)})",
            lambda: "(1 < ns.n < 3)",
        )
        return self._random.choice(kinds)()

    def _odd_one(self, depth: int) -> str:
        kinds: tuple[Callable[[], str], ...] = (
            lambda: self._applied(self.items, LIST_TO_ANYTHING, depth),
            lambda: self._applied(self.mapping, DICT_TO_ANYTHING, depth),
            lambda: "none",
            lambda: "nothing",
            lambda: self._random.choice(("cycler('a', 'b').next()", "joiner('|')()", "namespace(a=1).a", "ns")),
        )
        if self._random.random() < self._refused:
            return self._applied(self.anything, REFUSED, depth)
        return self._random.choice(kinds)()

    # --- helpers

    def _surprised(self) -> bool:
        return self._random.random() < self._surprise

    def _leaf(self, literals: Sequence[str], names: Sequence[str], depth: int) -> str:
        if depth > 0:
            return self.anything(depth - 1)
        return self._random.choice(literals if self._random.random() < 0.6 else names)

    def _number(self) -> str:
        return self._random.choice(self._numbers)

    def _given(self, depth: int) -> str:
        return self._random.choice((self.text, self.number))(depth - 1)

    def _applied(self, source: Callable[[int], str], forms: Sequence[str], depth: int) -> str:
        return f"({source(depth - 1)}){self._filled(self._random.choice(forms), depth)}"

    def _filled(self, form: str, depth: int) -> str:
        makers = {"#": lambda _: self._number(), "$": self.text, "@": self.items, "&": self.mapping, "?": self.anything}
        return _HOLE.sub(lambda hole: makers[hole[0]](min(depth - 1, 1)), form)


def hostile_draft(seed: int, case: int, real: Sequence[str]) -> str:
    """Return case `case` of `seed`: a program with huge numbers and texts, or a mutated real template."""
    random = Random(f"{seed}-{case}")
    draft = Draft(
        random,
        [*LARGE, *SMALL, *SMALL],
        [*TEXTS, *TEXTS, *LARGE_TEXTS],
        [*FORMATS, *LARGE_FORMATS],
        [*BRACES, *LARGE_BRACES],
        ["100000", "99999", "1000", "60", "3"],
        surprise=random.choice((0.0, 0.01, 0.1)),
        refused=random.choice((0.0, 0.05)),
    )
    return draft.template() if random.random() < 0.75 else _broken(random, draft, random.choice(real))


def mild_draft(seed: int, case: int) -> str:
    """Return case `case` of `seed`: a program that any sandbox could run."""
    return Draft(Random(f"mild-{seed}-{case}")).template()


def _broken(random: Random, draft: Draft, source: str) -> str:
    for _ in range(random.randint(1, 4)):
        tags = [*_TAG.finditer(source)]
        if not tags:
            break
        tag = random.choice(tags)
        change = random.choice((0, 0, 1, 2, 2, 3, 4, 5, 5, 6))
        if change == 0:  # insert a random statement before the tag
            source = source[: tag.start()] + draft.statement(3) + source[tag.start() :]
        elif change == 1:  # remove the tag
            source = source[: tag.start()] + source[tag.end() :]
        elif change == 2:  # repeat the tag
            source = source[: tag.start()] + tag[0] * random.choice((2, 30, 3000)) + source[tag.end() :]
        elif change == 3:  # replace numbers
            source = _NUMBER.sub(lambda _: f"({random.choice(LARGE)})", source, count=random.randint(1, 20))
        elif change == 4:  # wrap everything in a loop
            source = "{% for i in range(100000) %}" + source + "{% endfor %}"
        elif change == 5:  # replace the tag with another expression
            source = source[: tag.start()] + "{{ " + draft.anything(4) + " }}" + source[tag.end() :]
        else:  # remove or repeat some characters
            start = random.randrange(len(source))
            end = start + random.randint(1, 40)
            source = source[:start] + source[start:end] * random.choice((0, 2)) + source[end:]
    return source
