"""Templates that would run forever or exhaust memory without limits: every known trick, one line each."""

# ruff: noqa: E501 - a trick is easier read in one line
from __future__ import annotations

_MANY = "{% for i in range(100000) %}"
_MORE = "{% for j in range(100000) %}"
_END = "{% endfor %}"
_NS = "{% set ns = namespace(s='', l=[], t=(), d={}) %}"
_BIG = "{% set a = 'a' * 16000000 %}"
_WIDE = "{% set a = '\U0001f642' * 4000000 %}"


def looped(body: str, before: str = "") -> str:
    """Return a template that runs `body` 10,000,000,000 times, after `before`, with a namespace `ns`."""
    return f"{_NS}{before}{_MANY}{_MORE}{body}{_END}{_END}"


def doubled(body: str, before: str = "") -> str:
    """Return a template that runs `body` 60 times. Anything that doubles each time becomes astronomically large."""
    return f"{_NS}{before}{{% for i in range(60) %}}{body}{_END}"


HOSTILE: dict[str, str] = {
    # --- one call that creates something huge
    "center filter": "{{ 'a'|center(400000000) }}",
    "center method": "{{ 'a'.center(400000000) }}",
    "ljust": "{{ 'x'.ljust(400000000) }}",
    "rjust": "{{ 'x'.rjust(400000000, '\U0001f642') }}",
    "zfill": "{{ 'x'.zfill(400000000) }}",
    "expandtabs": "{{ '\t\t'.expandtabs(400000000) }}",
    "tojson indent": "{{ [1]|tojson(indent=400000000) }}",
    "tojson indent text": "{{ [[[1]]]|tojson(indent='a' * 16000000) }}",
    "tojson indent of a number": "{{ 1|tojson(indent=400000000) }}",
    "tojson indent of what is no json": "{{ [1]|map('string')|tojson(indent=400000000) }}",
    "tojson indent in a loop": looped("{{ 1|tojson(indent=9999999) }}"),
    "tojson separators": "{{ range(9999)|list|tojson(separators=['a' * 99999, 'b']) }}",
    "indent": "{{ 'a\nb'|indent(400000000) }}",
    "indent first": "{{ 'a'|indent(400000000, true) }}",
    "indent lines": "{{ ('a\n' * 100000)|indent('b' * 100000) }}",
    "percent": "{{ '%400000000d' % 1 }}",
    "percent by argument": "{{ '%*d' % (400000000, 1) }}",
    "percent precision": "{{ '%.400000000f' % 1 }}",
    "percent precision by argument": "{{ '%.*f' % (400000000, 1) }}",
    "percent with key": "{{ '%(a)400000000d' % {'a': 1} }}",
    "percent with nested key": "{{ '%((a))400000000d' % {'(a)': 1} }}",
    "percent many times": "{{ ('%(a)s' * 100000) % {'a': 'a' * 100000} }}",
    "format filter": "{{ '%400000000d'|format(1) }}",
    "is odd formats": "{{ '%400000000d' is odd }}",
    "is divisibleby formats": "{{ '%400000000d' is divisibleby(3) }}",
    "format method": "{{ '{:400000000d}'.format(1) }}",
    "format precision": "{{ '{:.400000000f}'.format(1.5) }}",
    "format nested": "{{ '{:{}}'.format(1, 400000000) }}",
    "format nested fill": "{{ '{:{}>{}}'.format('a', 'b', 400000000) }}",
    "format many times": "{{ ('{0}' * 100000).format('a' * 100000) }}",
    "format literals": "{{ ('{{' * 8000000).format() }}",
    "format map": "{{ '{a:400000000}'.format_map({'a': 1}) }}",
    "format through a variable": "{% set f = '{:400000000d}'.format %}{{ f(1) }}",
    "format of safe text": "{{ ('{:400000000d}'|safe).format(1) }}",
    "repeat": "{{ 'a' * 4000000000 }}",
    "repeat backwards": "{{ 4000000000 * 'a' }}",
    "repeat a list": "{{ [1] * 4000000000 }}",
    "repeat a tuple": "{{ (1,) * 4000000000 }}",
    "power": "{{ 7**(10**7) }}",
    "power of powers": "{{ 2 ** 200 * 2 ** 200 }}",
    "power tower": "{{ 9**9**9**9 }}",
    "round": "{{ 1|round(-1000000000) }}",
    "round up": "{{ 1|round(1000000000, 'ceil') }}",
    "replace": "{{ ('a' * 100000)|replace('a', 'b' * 100000) }}",
    "replace nothing": "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
    "replace in safe text": "{{ ('a' * 4000000)|safe|replace('a', '<') }}{{ (('a' * 4000000)|safe).replace('a', '<<') }}",
    "join": "{{ (range(100000)|list)|join('a' * 100000) }}",
    "join method": "{{ ('a' * 100000).join(['b'] * 100000) }}",
    "join safe text": "{{ ('a'|safe).join(['<' * 9000000]) }}",
    "batch fill": "{{ [1]|batch(400000000, 'a')|list }}",
    "slice": "{{ [1]|slice(4000000000)|list|length }}",
    "slice fill": "{{ [1]|slice(400000000, 'a')|list|length }}",
    "sum of lists": "{{ ([range(1000)|list] * 100000)|sum(start=[])|length }}",
    "long range": "{{ range(10000000)|list }}",
    "list of a text": _WIDE + "{{ a|list|length }}",
    "split in letters": _BIG + "{{ a.split('a')|length }}",
    "split in words": "{{ ('ab ' * 5000000).split()|length }}",
    "split in lines": "{{ ('ab\n' * 5000000).splitlines()|length }}",
    "escape": "{{ ('<' * 16000000)|e }}",
    "title": "{{ ('ab ' * 5000000)|title }}",
    "wordcount": "{{ ('ab ' * 5000000)|wordcount }}",
    "lower makes more": "{{ ('\u0130' * 4000000).lower().lower().lower() }}",
    "upper makes more": "{{ ('\u0390' * 8000000).upper() }}",
    "ensure ascii": "{{ ('\U0001f642' * 4000000)|tojson(ensure_ascii=true) }}",
    "tojson control characters": "{{ ('\x01' * 16000000)|tojson }}",
    "repr": "{{ ['\U000e0001' * 4000000] }}",
    "strftime": "{{ strftime_now('%400000000d') }}",
    "integer literal": "{{ 0x" + "f" * 100000 + " }}",
    "decimal literal": "{{ " + "9" * 100000 + " }}",
    "int of hex": "{{ ('f' * 999)|int(0, 16) }}",
    "int of a float": "{{ '1e308'|int }}",
    "lipsum": "{{ lipsum(n=100000000) }}",
    "spread arguments": "{{ dict(*('a' * 16000000)) }}",
    "spread names": "{% macro m() %}{{ kwargs }}{% endmacro %}{{ m(**dict(range(90000)|batch(2))) }}",
    # --- one call that runs forever
    "rfind": "{{ ('a' * 8000000).rfind('a' * 2000000 ~ 'b' ~ 'a' * 2000000) }}",
    "rindex": "{{ ('a' * 8000000).rindex('a' * 2000000 ~ 'b' ~ 'a' * 2000000) }}",
    "rsplit": "{{ ('a' * 8000000).rsplit('a' * 2000000 ~ 'b' ~ 'a' * 2000000) }}",
    "rpartition": "{{ ('a' * 8000000).rpartition('a' * 2000000 ~ 'b' ~ 'a' * 2000000) }}",
    "strip many": "{{ ('a' * 8000000).strip('b' * 4000000 ~ 'a') }}",
    "trim many": "{{ ('\u0101' * 3000000)|trim('b' * 3000000 ~ '\u0101') }}",
    "startswith many": _BIG + "{{ a.startswith((a[1:] ~ 'b',) * 1000000) }}",
    "in a list of equals": _BIG + "{{ (a[1:] ~ 'b') in [a] * 1000000 }}",
    "index in a list of equals": _BIG + "{{ ([a] * 1000000).index(a[1:] ~ 'b') }}",
    "count in a list of equals": _BIG + "{{ ([a] * 1000000).count(a[1:] ~ 'b') }}",
    "lists of equals": _BIG + "{{ [a] * 1000000 == [a[1:] ~ 'a'] * 1000000 }}",
    "sort equals": _BIG + "{{ ([a, a[1:] ~ 'b'] * 500000)|sort|length }}",
    "max of equals": _BIG + "{{ ([a, a[1:] ~ 'b'] * 500000)|max|length }}",
    "groupby equals": _BIG + "{{ ([{'k': a}, {'k': a[1:] ~ 'b'}] * 500000)|groupby('k')|length }}",
    "unique of equals": _BIG + "{{ ([a] * 1000000)|unique|list|length }}",
    "select equals": _BIG + "{% set b = a[1:] ~ 'b' %}{{ ([a] * 1000000)|select('==', b)|list|length }}",
    "map upper": _WIDE + "{{ ([a] * 1000000)|map('upper')|map('length')|list|length }}",
    "sort numbers": "{{ (range(100000)|list * 20)|sort|length }}",
    "attribute of many parts": "{{ [1]|map(attribute='a.' * 5000000)|list }}",
    "group by many": "{{ (range(100000)|list * 20)|groupby(0)|list|length }}",
    "keys with equal hashes": "{{ range(0, 100000 * (2**61 - 1), 2**61 - 1)|unique|list|length }}",
    "dict of equal hashes": "{{ dict(range(0, 100000 * (2**61 - 1), 2**61 - 1)|batch(2))|length }}",
    "dict of equal hashes in a loop": "{% set ns = namespace(d={}) %}"
    + _MANY
    + "{% set ns.d = dict(ns.d, **{'k' ~ i: i}) %}"
    + _END,
    "tuples with equal hashes": f"{_NS}{{% set ns.l = [()] %}}{{% for i in range(16) %}}{{% set ns.m = [] %}}"
    "{% for t in ns.l %}{% set ns.m = ns.m + [t + (-1,), t + (-2,)] %}{% endfor %}{% set ns.l = ns.m %}{% endfor %}"
    "{{ ns.l|unique|list|length }}",
    "json of floats": "{{ ([1.1] * 400000)|tojson|length }}",
    "text of floats": "{{ ([1.1e-300] * 400000)|string|length }}",
    "json of floats in loops": looped("{% set x = l|tojson %}", "{% set l = [1.1] * 100000 %}"),
    "digits": looped("{% set x = '%.999f' % 1e-300 %}{% set x = '{:.999f}'.format(1e-300) %}"),
    # --- shared parts: small in memory, endless when rendered, compared or hashed
    "written out": doubled("{% set ns.l = [ns.l, ns.l] %}") + "{{ ns.l }}",
    "written as text": doubled("{% set ns.l = [ns.l, ns.l] %}") + "{{ ns.l ~ '' }}",
    "written by a filter": doubled("{% set ns.l = [ns.l, ns.l] %}") + "{{ ns.l|string }}",
    "written as json": doubled("{% set ns.l = [ns.l, ns.l] %}") + "{{ ns.l|tojson }}",
    "written as dict": doubled("{% set ns.d = {'a': ns.d, 'b': ns.d} %}") + "{{ ns.d }}",
    "written by percent": doubled("{% set ns.l = [ns.l, ns.l] %}") + "{{ '%s' % [ns.l] }}{{ '%r' % (ns.l,) }}",
    "written by format": doubled("{% set ns.l = [ns.l, ns.l] %}") + "{{ '{}'.format(ns.l) }}",
    "written by format r": doubled("{% set ns.l = [ns.l, ns.l] %}") + "{{ '{!r}'.format(ns.l) }}",
    "written by join": doubled("{% set ns.l = [ns.l, ns.l] %}") + "{{ [ns.l]|join }}",
    "written by an exception": doubled("{% set ns.l = [ns.l, ns.l] %}") + "{{ raise_exception(ns.l) }}",
    "written by undefined": doubled("{% set ns.l = [ns.l, ns.l] %}") + "{{ {}[ns.l].x }}",
    "written by index": doubled("{% set ns.l = [ns.l, ns.l] %}") + "{{ [].index(ns.l) }}",
    "compared": doubled("{% set ns.l = [ns.l, ns.l] %}{% set ns.m = [ns.m, ns.m] %}", "{% set ns.m = [] %}")
    + "{{ ns.l == ns.m }}",
    "compared as less": doubled("{% set ns.l = [ns.l, ns.l] %}{% set ns.m = [ns.m, ns.m] %}", "{% set ns.m = [] %}")
    + "{{ ns.l < ns.m }}",
    "compared by in": doubled("{% set ns.l = [ns.l, ns.l] %}{% set ns.m = [ns.m, ns.m] %}", "{% set ns.m = [] %}")
    + "{{ ns.l in [ns.m] }}",
    "compared by a test": doubled("{% set ns.l = [ns.l, ns.l] %}{% set ns.m = [ns.m, ns.m] %}", "{% set ns.m = [] %}")
    + "{{ ns.l is eq ns.m }}",
    "compared by changed": doubled("{% set ns.l = [ns.l, ns.l] %}{% set ns.m = [ns.m, ns.m] %}", "{% set ns.m = [] %}")
    + "{% for x in [ns.l, ns.m] %}{{ loop.changed(x) }}{% endfor %}",
    "hashed": doubled("{% set ns.t = (ns.t, ns.t) %}") + "{{ {ns.t: 1} }}",
    "hashed by get": doubled("{% set ns.t = (ns.t, ns.t) %}") + "{{ {}.get(ns.t) }}",
    "hashed by in": doubled("{% set ns.t = (ns.t, ns.t) %}") + "{{ ns.t in {} }}",
    "hashed by item": doubled("{% set ns.t = (ns.t, ns.t) %}") + "{{ {}[ns.t] }}",
    "hashed by unique": doubled("{% set ns.t = (ns.t, ns.t) %}") + "{{ [ns.t]|unique|list|length }}",
    "hashed by dict": doubled("{% set ns.t = (ns.t, ns.t) %}") + "{{ dict([(ns.t, 1)])|length }}",
    "nested lists": f"{_NS}{_MANY}{{% set ns.l = [ns.l] %}}{_END}{{{{ ns.l }}}}",
    "nested lists as json": f"{_NS}{_MANY}{{% set ns.l = [ns.l] %}}{_END}{{{{ ns.l|tojson }}}}",
    "nested lists as json lines": f"{_NS}{_MANY}{{% set ns.l = [ns.l] %}}{_END}{{{{ ns.l|tojson(indent=0) }}}}",
    "nested tuples hashed": f"{_NS}{_MANY}{{% set ns.t = (ns.t,) %}}{_END}{{{{ {{ns.t: 1}} }}}}",
    "nested tuples got": f"{_NS}{_MANY}{{% set ns.t = (ns.t,) %}}{_END}{{{{ {{}}.get(ns.t) }}}}",
    "nested tuples sought": f"{_NS}{_MANY}{{% set ns.t = (ns.t,) %}}{_END}{{{{ ns.t in {{}} }}}}",
    "nested dicts": f"{_NS}{_MANY}{{% set ns.d = {{'a': ns.d}} %}}{_END}{{{{ ns.d }}}}",
    "nested namespaces": f"{_NS}{_MANY}{{% set ns.n = namespace(n=ns.n) %}}{_END}{{{{ ns }}}}",
    "nested methods": f"{_NS}{_MANY}{{% set ns.l = [ns.l.index] %}}{_END}{{{{ raise_exception('done') }}}}",
    "nested lazy filters": f"{_NS}{_MANY}{{% set ns.l = ns.l|map('upper') %}}{_END}",
    "nested items": f"{_NS}{_MANY}{{% set ns.l = ns.l|select %}}{_END}",
    "nested joiners": f"{_NS}{_MANY}{{% set ns.j = joiner(ns.j) %}}{_END}{{{{ nothing.x }}}}",
    "nested cyclers": f"{_NS}{_MANY}{{% set ns.c = cycler(ns.c) %}}{_END}{{{{ nothing.x }}}}",
    "nested lazy filters in lists": f"{_NS}{_MANY}{{% set ns.l = [ns.l]|map('upper') %}}{_END}{{{{ nothing.x }}}}",
    "nested lazy filters begun": f"{_NS}{_MANY}{{% set ns.m = [ns.l, ns.l]|select %}}{{% set x = ns.m|first %}}"
    f"{{% set ns.l = ns.m %}}{_END}{{{{ nothing.x }}}}",
    "nested macros": f"{_NS}{_MANY}{{% set o = ns.m %}}{{% macro m() %}}{{{{ o }}}}{{% endmacro %}}{{% set ns.m = m %}}{_END}"
    "{{ nothing.x }}",
    "nested loops": f"{_NS}{_MANY}{{% for x in [ns.l] %}}{{% set ns.l = loop %}}{{{{ loop.index }}}}{{% endfor %}}{_END}"
    "{{ nothing.x }}",
    "nested undefined": f"{_NS}{_MANY}{{% set ns.u = [ns.u].x %}}{_END}{{{{ nothing.x }}}}",
    "nested views": f"{_NS}{_MANY}{{% set ns.d = {{'a': ns.d}}.items() %}}{_END}{{{{ nothing.x }}}}",
    "nested formats": f"{_NS}{_MANY}{{% set ns.s = [ns.s, '%s'|format]|first %}}{_END}{{{{ nothing.x }}}}",
    "itself": "{% set ns = namespace() %}{% set ns.n = ns %}{{ ns }}",
    "itself in a list": "{% set ns = namespace() %}{% set ns.n = [ns] %}{{ [ns] }}",
    "itself hashed": "{% set ns = namespace() %}{% set ns.n = (ns,) %}{{ {ns.n: ns.n == (ns, 1)} }}{{ ns.n }}",
    # --- loops
    "nested ranges": looped(""),
    "three ranges": _MANY * 3 + _END * 3,
    "nested ranges with a condition": "{% for i in range(100000) if false %}{% endfor %}" * 100
    + "{% for k in range(100000) %}{% for i in range(100000) if false %}{% endfor %}{% endfor %}",
    "loops with text": looped("x"),
    "loops with blocks of text": looped("{% set x %}xxxxxxxx{% endset %}"),
    "loops with filters": looped("{{ 'a'|upper|lower|trim }}"),
    "loops with tests": looped("{% if i is odd and j is string %}{% endif %}"),
    "loops with attributes": looped("{% set x = messages[0].content.strip %}"),
    "loops with sets": looped("{% set x = 1 %}" * 1500),
    "loops with arithmetic": looped("{% set x = i * j + i - j // 3 %}"),
    "loops with floats": looped("{% set x = (i + 1.5) ** 0.5 %}"),
    "loops with namespaces": looped("{% set ns.n = namespace(a=1) %}"),
    "loops with macros": looped("{% macro m() %}{% endmacro %}"),
    "loops with calls": "{% macro m() %}{{ caller() }}{% endmacro %}" + looped("{% call m() %}a{% endcall %}"),
    "loops with cycles": looped("{{ loop.cycle('a', 'b') }}{{ loop.changed(j) }}{{ loop.last }}{{ loop.length }}"),
    "loops with cyclers": "{% set c = cycler('a', 'b') %}{% set k = joiner() %}" + looped("{{ c.next() }}{{ k() }}"),
    "loops with sorts": looped("{% set x = range(1000)|sort|list %}"),
    "loops with searches": looped("{% set x = 'b' in a %}", _BIG),
    "loops with comparisons": looped("{% set x = a == b %}", _BIG + "{% set b = a[1:] ~ 'b' %}"),
    "loops with strips": looped("{% set x = a.strip() %}", "{% set a = ' ' * 16000000 %}"),
    "loops with replaces": looped("{% set x = a.replace('a', 'b') %}", _BIG),
    "loops with slices": looped("{% set x = a[1:] %}", _BIG),
    "loops with upper": looped("{% set x = a.upper() %}", _WIDE),
    "loops with casefold": looped("{% set x = a is lower %}", _WIDE),
    "loops with isalnum": looped("{% set x = a.isalnum() %}", _BIG),
    "loops with count": looped("{% set x = a.count('ab') %}", _BIG),
    "loops with wordcount": looped("{% set x = a|wordcount %}", _BIG),
    "loops with splits": looped("{% set x = a.split('b') %}", _BIG),
    "loops with json": looped("{% set x = a|tojson %}", "{% set a = range(10000)|list %}"),
    "loops with lists": looped("{% set x = a|list %}", _BIG),
    "loops with unpacking": looped("{% set x, y = 'ab' %}{% set x, y = [i, j] %}"),
    "loops with a format": looped("{% set x = '%s %d' % (i, j) %}{% set x = '{} {}'.format(i, j) %}"),
    "loops over a text": _BIG + "{% for x in a %}{% for y in a %}{% endfor %}{% endfor %}",
    "loops over a map": "{% for x in range(100000)|map('string') %}{% for y in range(100000)|select %}{% endfor %}{% endfor %}",
    "loops over batches": "{% for x in range(100000)|batch(1) %}{% for y in range(100000)|slice(99999) %}{% endfor %}{% endfor %}",
    "loops over pairs": "{% set d = dict(range(100000)|map('string')|batch(2)) %}"
    "{% for k in d|items %}{% for l in d|dictsort %}{% endfor %}{% endfor %}",
    "many loops": "{% for i in range(100000) %}{% endfor %}" * 1500,
    "many searches": _BIG + "{% set x = 'b' in a %}" * 1500,
    "many sorts": "{% set l = range(100000)|list %}" + "{% set x = l|sort(reverse=true) %}" * 1200,
    "many lazy items": "{{ range(100000)" + "|map('string')" * 19 + "|list|length }}",
    "loop recursion": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "loop recursion that widens": "{% for x in range(9) recursive %}{% if loop.depth < 90 %}{{ loop(range(9)) }}{% endif %}{% endfor %}",
    "loop recursion over ranges": "{% for x in [1] recursive %}{{ loop(range(100000)) }}{% endfor %}",
    "macro recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "macro recursion that widens": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    "macros in turn": "{% macro f() %}{{ ns.g() }}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}"
    "{% set ns = namespace(g=g) %}{{ f() }}",
    "macro recursion by filters": "{% macro f() %}{{ caller() }}{% endmacro %}{% macro g() %}"
    "{% call f() %}{{ g() }}{% endcall %}{% endmacro %}{{ g() }}",
    "macro that doubles": "{% macro f(s, n) %}{{ f(s ~ s, n - 1) if n else s }}{% endmacro %}{{ f('a', 90) }}",
    # --- many small allocations
    "hoard texts": looped("{% set ns.l = [ns.l, 'a' * 100000 ~ j] %}"),
    "hoard short texts": looped("{% set ns.l = [ns.l, 'a' ~ j] %}"),
    "hoard numbers": looped("{% set ns.l = [ns.l, j * 1.5] %}"),
    "hoard integers": looped("{% set ns.l = [ns.l, 2 ** 120 + j] %}"),
    "hoard negatives": looped("{% set ns.l = [ns.l" + ", -x" * 1000 + "] %}", "{% set x = 2 ** 120 %}"),
    "hoard lists": looped("{% set ns.l = [ns.l, [], [], [], [], [], []] %}"),
    "hoard dicts": looped("{% set ns.l = [ns.l, {}, {'a': 1}, {}, {}] %}"),
    "hoard tuples": looped("{% set ns.l = (ns.l, (i, j), (j, i)) %}"),
    "hoard methods": looped("{% set ns.l = [ns.l, 'a'.strip, 'a'.strip, 'a'.strip, 'a'.strip, 'a'.strip] %}"),
    "hoard namespaces": looped("{% set ns.l = [ns.l, namespace()] %}"),
    "hoard filled namespaces": looped(
        "{% set ns.l = [ns.l, namespace(" + ",".join(f"a{i}=1" for i in range(200)) + ")] %}"
    ),
    "hoard macros": looped("{% macro m() %}{% endmacro %}{% set ns.l = [ns.l, m] %}"),
    "hoard lazy filters": looped("{% set ns.l = [ns.l, [1]|map('upper'), [1]|select, [1]|batch(1)] %}"),
    "hoard cyclers": looped("{% set ns.l = [ns.l, cycler(1), joiner()] %}"),
    "hoard ranges": looped("{% set ns.l = [ns.l, range(j)] %}"),
    "hoard loops": looped("{% set ns.l = [ns.l, loop] %}"),
    "hoard undefined": looped("{% set ns.l = [ns.l, messages.x, messages.y, messages.z] %}"),
    "hoard views": looped("{% set ns.l = [ns.l, messages[0].items(), messages[0].keys()] %}"),
    "hoard splits": looped("{% set ns.l = [ns.l, ('ab ' * 1000).split()] %}"),
    "hoard pieces": looped("{% set ns.l = [ns.l, ('a' * 1000000 ~ j).split('b')[0]] %}"),
    "hoard slices": looped("{% set ns.l = [ns.l, a[1:], a[2:], a[3:]] %}", "{% set a = range(10000)|list %}"),
    "hoard groups": looped("{% set ns.l = [ns.l, messages|groupby('role')] %}"),
    "hoard arguments": "{% macro f(s, n) %}{{ f(s[1:], n + 1) }}{% endmacro %}" + _BIG + "{{ f(a, 0) }}",
    "hoard variables": _BIG + "".join(f"{{% set a{i} = a[{i}:] %}}" for i in range(1, 900)),
    "hoard doubled": doubled("{% set ns.s = ns.s ~ ns.s ~ 'aaaa' %}"),
    "hoard doubled lists": doubled("{% set ns.l = ns.l + ns.l + [1] %}"),
    "hoard added": looped(
        "{% set ns.s = ns.s ~ 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa' %}"
    ),
    "hoard added lists": looped("{% set ns.l = ns.l + [j] %}"),
    "hoard blocks": looped(
        "{% set x %}{{ a }}{{ a }}{{ a }}{% endset %}{% set ns.l = [ns.l, x] %}", "{% set a = 'a' * 99999 %}"
    ),
    "hoard safe text": "{% set a = ('a' * 16000000)|safe %}{% set x %}" + "{{ a }}" * 1000 + "{% endset %}",
    "hoard safe text in a filter": "{% set a = ('a' * 9000000)|safe %}{% filter upper %}"
    + "{{ a }}" * 1000
    + "{% endfilter %}",
    "hoard words": looped("{% set ns.l = [ns.l, s.split()] %}", "{% set s = ('a' * 20 ~ ' ') * 9999 %}"),
    "hoard words one by one": looped("{% set ns.l = [ns.l, 'a' * 20 ~ j] %}"),
    "hoard cyclers of many": looped("{% set ns.l = [ns.l, cycler(*l)] %}", "{% set l = range(100)|list %}"),
    "hoard arguments of many": "{% macro m() %}{% set ns.l = [ns.l, varargs] %}{% endmacro %}"
    + looped("{{ m(*l) }}", "{% set l = range(100)|list %}"),
    "hoard names of many": "{% macro m() %}{% set ns.l = [ns.l, kwargs] %}{% endmacro %}"
    + looped("{{ m(**d) }}", "{% set d = dict(range(100)|map('string')|batch(2)) %}"),
    "hoard names in the call": "{% set ns = namespace(l=[]) %}{% macro m() %}{% set ns.l = [ns.l, kwargs] %}{% endmacro %}"
    + _MANY
    + "{{ m("
    + ",".join(f"a{i}=1" for i in range(1000))
    + ") }}"
    + _END,
    "hoard arguments in the call": "{% set ns = namespace(l=[]) %}{% macro m() %}{% set ns.l = [ns.l, varargs] %}{% endmacro %}"
    + _MANY
    + "{{ m("
    + "1," * 5000
    + ") }}"
    + _END,
    "hoard namespaces of many": looped(
        "{% set ns.l = [ns.l, namespace(d)] %}", "{% set d = dict(range(10000)|map('string')|batch(2)) %}"
    ),
    "hoard loops in loops": looped("{% for x in [1] %}{% set ns.l = [ns.l, loop] %}{% endfor %}"),
    "hoard pairs": looped(
        "{% set ns.l = [ns.l, d.items()|list] %}", "{% set d = dict(range(1000)|map('string')|batch(2)) %}"
    ),
    "hoard characters": looped("{% set ns.l = [ns.l, a[0], a[1], a[2], a[3]] %}", "{% set a = '\U0001f642' * 4 %}"),
    "output": looped("{{ a }}", "{% set a = 'a' * 100000 %}"),
    "output of wide text": "\U0001f642" + looped("{{ a }}", "{% set a = 'a' * 100000 %}"),
    "output in a block": "{% set x %}" + looped("{{ a }}", "{% set a = 'a' * 100000 %}") + "{% endset %}",
    "output in a filter": "{% filter upper %}" + looped("{{ a }}", "{% set a = 'a' * 100000 %}") + "{% endfilter %}",
    "output in a macro": "{% macro m() %}"
    + looped("{{ a }}", "{% set a = 'a' * 100000 %}")
    + "{% endmacro %}{{ m() }}",
    "output of data": looped("a" * 100000),
    # --- template source
    "brackets": "{{ " + "(" * 60000 + ")" * 60000 + " }}",
    "lists in lists": "{{ " + "[" * 60000 + "]" * 60000 + " }}",
    "dicts in dicts": "{{ " + "{1:" * 40000 + "1" + "}" * 40000 + " }}",
    "calls in calls": "{{ " + "f(" * 40000 + ")" * 40000 + " }}",
    "items in items": "{{ " + "a[" * 40000 + "1" + "]" * 40000 + " }}",
    "not not": "{{ " + "not " * 30000 + "1 }}",
    "minus minus": "{{ " + "- " * 30000 + "1 }}",
    "attributes": "{{ a" + ".b" * 60000 + " }}",
    "items": "{{ a" + "[1]" * 40000 + " }}",
    "calls": "{{ a" + "()" * 60000 + " }}",
    "filters": "{{ 1" + "|e" * 60000 + " }}",
    "tests": "{{ 1" + " is odd" * 15000 + " }}",
    "additions": "{{ 1" + "+1" * 60000 + " }}",
    "additions under the limit of tokens": "{{ 1" + "+1" * 9000 + " }}",
    "concatenations": "{{ 1" + "~1" * 60000 + " }}",
    "comparisons": "{{ 1" + "<2" * 60000 + " }}",
    "powers": "{{ 1" + "**1" * 40000 + " }}",
    "conditions": "{{ " + "1 if 1 else " * 10000 + "1 }}",
    "and and": "{{ 1" + " and 1" * 20000 + " }}",
    "or or under the limit of tokens": "{{ 1" + " or 1" * 9000 + " }}",
    "blocks": "{% if a %}" * 6000 + "{% endif %}" * 6000,
    "loops in loops": "{% for a in b %}" * 4000 + "{% endfor %}" * 4000,
    "loops in loops, few": "{% for a in b %}" * 25 + "{% endfor %}" * 25,
    "sets in sets": "{% set a %}" * 5000 + "{% endset %}" * 5000,
    "filters in filters": "{% filter e %}" * 4000 + "{% endfilter %}" * 4000,
    "macros in macros": "{% macro m() %}" * 4000 + "{% endmacro %}" * 4000,
    "calls of calls": "{% call m() %}" * 4000 + "{% endcall %}" * 4000,
    "branches": "{% if a %}" + "{% elif a %}" * 8000 + "{% endif %}",
    "branches under the limit of tokens": "{% if a %}" + "{% elif a %}" * 4000 + "{% endif %}",
    "outputs": "{{ a }}" * 18000,
    "macros": "".join(f"{{% macro m{i}(a,b) %}}{{% endmacro %}}" for i in range(3000)),
    "names": "{{ [" + "a," * 60000 + "] }}",
    "names under the limit of tokens": "{{ [" + "a," * 9900 + "] }}" + "{{ nothing.x }}",
    "arguments under the limit of tokens": "{{ nothing(" + "a," * 9900 + ") }}",
    "outputs under the limit of tokens": "{{ a }}" * 6500 + "{{ nothing.x }}",
    "branches with sets": "".join(f"{{% if a %}}{{% set v{i} = 1 %}}{{% endif %}}" for i in range(1600))
    + "{{ nothing.x }}",
    "branches with names": "".join(f"{{% if v{i} %}}{{% endif %}}" for i in range(2800)) + "{{ nothing.x }}",
    "sets, then branches": "".join(f"{{% set v{i} = 1 %}}" for i in range(1500))
    + "{% if a %}{% endif %}" * 1500
    + "{{ nothing.x }}",
    "sets, then conditions": "".join(f"{{% set v{i} = 1 %}}" for i in range(1500))
    + "{{ 1 if a else 2 }}" * 1300
    + "{{ nothing.x }}",
    "sets, then loops": "".join(f"{{% set v{i} = 1 %}}" for i in range(1500))
    + "{% for a in b %}{% set x = 1 %}{% endfor %}" * 600
    + "{{ nothing.x }}",
    "sets in a loop": "{% for i in [1] %}"
    + "".join(f"{{% set v{i} = v{i - 1} %}}" for i in range(1, 2900))
    + "{% endfor %}{{ nothing.x }}",
    "loops in loops with names": "".join(f"{{% for v{i} in b %}}{{% set w{i} = v{i} %}}" for i in range(18))
    + "{{ a }}" * 5000
    + "{% endfor %}" * 18
    + "{{ nothing.x }}",
    "macros under the limit of tokens": "".join(
        f"{{% macro m{i}(a,b) %}}{{{{ a }}}}{{% endmacro %}}" for i in range(1100)
    )
    + "{{ nothing.x }}",
    "literals under the limit of tokens": "{{ [" + "{1:[1]}," * 2400 + "] }}{{ nothing.x }}",
    "long names": "".join(f"{{{{ {'n' * 60000}{i} }}}}" for i in range(2)) + "{{ nothing.x }}",
    "a long name often": "{% set " + "n" * 6000 + " = 1 %}" + ("{{ " + "n" * 6000 + " }}") * 19 + "{{ nothing.x }}",
    "long text": "{{ '" + "a" * 200000 + "' }}",
    "long comment": "{#" + "a" * 200000 + "#}",
    "an open comment": "{#" * 60000,
    "an open text": "{{ '" + "\\'" * 60000,
    "an open tag": "{%" + " " * 120000,
    "an open raw": "{% raw %}" + "{% endraw" * 10000,
    "import": "{% import 'x' as y %}",
    "include": "{% include 'x' %}",
    "extends": "{% extends 'x' %}",
    "block that calls itself": "{% block a %}{{ self.a() }}{% endblock %}",
    "inner filter by name": "{{ [-10 ** 12]|map(' pay')|list }}",
    "inner filter by name in a loop": looped("", "{{ [-10 ** 12]|map(' pay')|list }}"),
}

# Templates that plain Jinja2 renders to a short text. The two with floats finish only on a fast machine.
HARMLESS = {
    *("json of floats", "text of floats"),
    *("power of powers", "power tower", "strftime", "int of hex", "int of a float", "long text", "long comment"),
    *("itself", "itself in a list", "itself hashed"),
}
