"""What a scanner of code has to know of the languages that models write most: one entry each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Language:
    """Words and signs of a language. `block` and `long_strings` may go on over lines, `strings` may not.

    comments      what a comment to the end of the line begins with
    block         how a comment of many lines begins and ends
    strings       delimiters; a backslash escapes one
    long_strings  how a string of many lines begins and ends
    """

    keywords: frozenset[str]
    comments: tuple[str, ...] = ()
    block: tuple[tuple[str, str], ...] = ()
    strings: tuple[str, ...] = ('"', "'")
    long_strings: tuple[tuple[str, str], ...] = ()


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_C_BLOCK = (("/*", "*/"),)
_DOCSTRINGS = (('"""', '"""'), ("'''", "'''"))
_JAVA = _words("""
    abstract as assert async await bool boolean break byte case catch char class companion const continue data default
    do double else enum extends extension false final finally float for foreach fun func get guard if implements import
    in init instanceof int interface internal is let long namespace native new nil null object open out override
    package private protected protocol public record return sealed self set short static string struct super switch
    synchronized this throw throws true try typealias using val var void volatile when where while yield
""")
_SQL = _words("""
    add all alter and as asc between by case create default delete desc distinct drop else end exists foreign from full
    group having in index inner insert into is join key left like limit not null offset on or order outer primary
    references right select set table then union unique update values view when where with
""")

_LANGUAGES = {
    "python": Language(
        _words("""
            and as assert async await break case class continue def del elif else except finally for from global if
            import in is lambda match nonlocal not or pass raise return self try while with yield True False None
        """),
        comments=("#",),
        long_strings=_DOCSTRINGS,
    ),
    "javascript": Language(
        _words("""
            as async await break case catch class const continue debugger default delete do else enum export extends
            false finally for from function if implements import in instanceof interface let new null of private
            protected public readonly return static super switch this throw true try type typeof undefined var void
            while with yield
        """),
        comments=("//",),
        block=_C_BLOCK,
        long_strings=(("`", "`"),),
    ),
    "c": Language(
        _words("""
            auto bool break case catch char class const constexpr continue default delete do double else enum explicit
            extern false float for goto if inline int long namespace new nullptr operator override private protected
            public return short signed sizeof static struct switch template this throw true try typedef typename union
            unsigned using virtual void volatile while NULL size_t
            #include #define #if #ifdef #ifndef #else #endif #pragma
        """),
        comments=("//",),
        block=_C_BLOCK,
    ),
    "java": Language(_JAVA, comments=("//",), block=_C_BLOCK, long_strings=_DOCSTRINGS[:1]),
    "rust": Language(
        _words("""
            as async await break const continue crate dyn else enum extern false fn for if impl in let loop match mod
            move mut pub ref return self Self static struct super trait true type unsafe use where while
        """),
        comments=("//",),
        block=_C_BLOCK,
        strings=('"',),  # an apostrophe begins a lifetime
    ),
    "go": Language(
        _words("""
            break case chan const continue default defer else fallthrough for func go goto if import interface map
            package range return select struct switch type var true false nil string int error bool byte
        """),
        comments=("//",),
        block=_C_BLOCK,
        long_strings=(("`", "`"),),
    ),
    "ruby": Language(
        _words("""
            alias and attr_accessor begin break case class def do else elsif end ensure false for if in module next nil
            not or puts require rescue retry return self super then true undef unless until when while yield
        """),
        comments=("#",),
    ),
    "php": Language(_JAVA | _words("echo elseif endif foreach function use"), comments=("//", "#"), block=_C_BLOCK),
    "lua": Language(
        _words("""
            and break do else elseif end false for function goto if in local nil not or repeat return then true until
            while
        """),
        comments=("--",),
        long_strings=(("[[", "]]"),),
    ),
    "sql": Language(_SQL | {word.upper() for word in _SQL}, comments=("--",), block=_C_BLOCK),
    "shell": Language(
        _words("""
            alias case cd declare do done echo elif else esac eval exec exit export fi for function if in local
            readonly return set source sudo test then trap unset until while
        """),
        comments=("#",),
    ),
    "json": Language(_words("true false null"), comments=("//",)),
    "yaml": Language(_words("true false null yes no"), comments=("#",)),
    "toml": Language(_words("true false"), comments=("#",), long_strings=_DOCSTRINGS),
    "make": Language(
        _words("""
            FROM RUN CMD COPY ADD ENV ARG WORKDIR EXPOSE ENTRYPOINT USER VOLUME include ifeq ifneq endif else
        """),
        comments=("#",),
    ),
    "html": Language(frozenset(), block=(("<!--", "-->"),)),
    "css": Language(_words("@media @import @keyframes @font"), block=_C_BLOCK),
}
_OTHER_NAMES = {
    "python": "py python3 py3 pycon gdscript",
    "javascript": "js jsx ts tsx typescript mjs node",
    "c": "c++ cpp cc h hpp cuda objc objective-c arduino",
    "java": "csharp c# cs kotlin kt swift scala dart groovy",
    "rust": "rs",
    "go": "golang",
    "ruby": "rb",
    "sql": "mysql postgresql sqlite plsql",
    "shell": "sh bash zsh fish console terminal",
    "json": "jsonc json5",
    "yaml": "yml",
    "toml": "ini cfg conf",
    "make": "makefile dockerfile cmake",
    "html": "xml svg vue",
    "css": "scss less",
}
_BY_NAME = _LANGUAGES | {other: _LANGUAGES[name] for name, others in _OTHER_NAMES.items() for other in others.split()}


def language_of(name: str) -> Language | None:
    """The language that the first line of a fence names; None when it is not known."""
    return _BY_NAME.get(name.lower())
