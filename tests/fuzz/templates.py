"""Chat templates with every filter and test of Jinja, with loops, and with what no sandbox offers."""

import random
from pathlib import Path

import jinja2

from . import material

_PARTS = [
    "{{ ('a.b ' * 10**6)|urlize }}", "{{ ('<' * 10**6)|striptags }}", "{{ ('a b ' * 10**8)|title }}",
    "{{ ('x' * 10**6)|wordcount }}", "{{ ('a' * 10**6)|indent(10**6) }}", "{{ [1] * 10**7 is sequence }}",
    "{{ ([3, 1] * 10**6)|sort|list|length }}", "{{ range(10**4)|batch(1, 'x' * 10**5)|list }}",
    "{{ 'x'|xmlattr }}", "{{ ('&' * 10**7)|escape }}", "{{ ('ab' * 10**6)|unique|list }}",
    "{{ range(10**9) }}", "{{ 'a' * 10**11 }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ 1/0 }}",
    "{{ x.y }}", "{% if", "{{ messages[9].content }}", "{{ raise_exception('no') }}", "{{ messages.append(1) }}",
    "{{ ''.__class__ }}", "{{ namespace(a=1).a }}", "{{ lipsum(n=3) }}", "{% generation %}x{% endgeneration %}",
    "{{ '\x1b[31m' }}", "{{ messages|tojson }}", "{{ 5 + 'x' }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 10**(10**9) }}", "{{ 5|round(-99999999) }}", "{{ 'a'|center(10**9) }}", "{{ (10**99999)|string }}",
    "{% set x = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set x.a = [x.a] * 9 %}{% set x.b = [x.b] * 9 %}"
    "{% endfor %}{{ x.a == x.b }}", "{{ [[[1] * 9999] * 9999] * 9999 }}", "{{ 'ab'|wordwrap(1, true, 'x' * 10**8) }}",
    "{% break %}", "{{ '%s' * 9 % 1 }}", "{{ '{:>999999999}'.format(1) }}", "{{ '%999999999d' % 1 }}",
    "{{ strftime_now('%Y' * 10**7) }}", "{% set ns = messages %}{% set messages = [] %}", "{{ cycler('a').next }}",
    "{{ joiner('x' * 10**8)() }}", "{{ dict(a=1)|dictsort }}", "{{ 'x'.join(['y' * 10**4] * 10**5) }}",
    "{{ ('a' * 10**5).replace('a', 'b' * 10**5) }}", "{{ 'a'.zfill(10**10) }}",
    "{{ ('\\t' * 10**4).expandtabs(10**6) }}",
]  # fmt: skip
_SUBJECTS = [
    "('a' * 10**7)", "('a.b <i>&amp; ' * 10**6)", "range(10**7)", "([3, 1, 2] * 10**6)", "10**4000", "-10**30",
    "none", "x", "messages", "messages[0]", "'%s'", "''", "1e308", "true", "[[[]]]", "{'a': [1] * 10**6}",
]  # fmt: skip
_ARGUMENTS = [
    "",
    "",
    "",
    "(10**9)",
    "(-1)",
    "('x')",
    "(none)",
    "(10**6, 'x' * 10**6)",
    "('content')",
    "(1, 2, 3, 4)",
]


def template(root: Path, folder: Path, draw: random.Random) -> tuple[str, list[object]]:
    """Draw something that is added to the target's template, somewhere in it."""
    target = material.copy(root, "target", folder)
    file = target / "chat_template.jinja"
    text, part = file.read_text(), draw.choice([draw.choice(_PARTS), _filtered(draw), _tested(draw)])
    place = draw.choice([0, len(text), text.index("{{"), text.index("{% endfor")])
    file.write_text(text[:place] + part + text[place:])
    words = ["--target", target, "--data", root / "rows.jsonl", "--output", folder / "out"]
    return f"template: {part[:60]} at {place}", ["plan", *words]


def _filtered(draw: random.Random) -> str:
    chain = "".join(
        f"|{draw.choice(sorted(jinja2.filters.FILTERS))}{draw.choice(_ARGUMENTS)}"
        for _ in range(draw.choice([1, 1, 2]))
    )
    return f"{{{{ {draw.choice(_SUBJECTS)}{chain} }}}}"


def _tested(draw: random.Random) -> str:
    name = draw.choice(sorted(name for name in jinja2.tests.TESTS if name.isalpha()))
    return f"{{{{ {draw.choice(_SUBJECTS)} is {name}{draw.choice(_ARGUMENTS)} }}}}"
