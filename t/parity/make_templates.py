"""Random templates and what Jinja2 makes of them, in the environment of Hugging Face's chat templates:
make_templates.py COUNT SEED, a JSON object a line: {template, variables, text: null where refused}.

An expression that fails takes its template with it, so a template is one to three short pieces, and
most operands have types that fit.
"""

import json
import random
import sys

from transformers.utils import chat_template_utils

R = random.Random()

VARIABLES = {
    "x": "a b", "s": " \u00a0a\tb\u001c ", "w": "Hello, World", "u": "ΑΣ ß é日本👍🏽", "e": "", "h": "<a href='x'>&</a>",
    "lines": "a\n\n  b\r\nc\n", "digits": "42", "f": 1e-5, "g": 2.5, "n": 7, "z": 0, "neg": -3,
    "big": 2**70, "huge": 10**40, "yes": True, "no": False, "nil": None,
    "l": [1, 2.5, None], "ints": [3, 1, 2], "words": ["b", "a", "C", "b"], "empty": [], "nest": [[1, 2], ["a"], []],
    "d": {"a": 1, "é": "it's \u200b"}, "t": {"type": "string", "items": [1], "keys": "k", "a": {"b": [1, {"c": None}]}},
    "void": {}, "nums": {"b": 2, "a": 1, "C": 0.5},
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "18°C", "name": "f"},
    ],
}  # fmt: skip
KINDS = {
    "str": ["x", "s", "w", "u", "e", "h", "lines", "digits", "d.é", "words[0]", "messages[0].content", "t['type']"],
    "num": ["f", "g", "n", "z", "neg", "yes", "no", "big", "huge", "ints[0]", "l[1]", "nums.b"],
    "list": ["l", "ints", "words", "empty", "nest", "messages", "nest[0]", "messages[1].content"],
    "dict": ["d", "t", "void", "nums", "t.a", "messages[0]"],
    "other": ["nil", "missing", "d.missing", "l[9]", "none", "l", "d", "x", "n", "yes"],
}
STRINGS = ["''", "'a'", "'b'", "' '", "','", "'a b'", "'é'", "'%s|%d'", "'{} {}'", "'A'", "'1'", "'role'", "'\\n'"]
NUMBERS = ["0", "1", "2", "-1", "3", "1.0", "0.5", "1e3", "10", "2.50", "true", "false", "1_000", "0x1f"]
FILTERS = {
    "str": ["upper", "lower", "title", "capitalize", "trim", "trim('a')", "replace('a', 'b')", "replace('', '-')",
            "replace('a', 'b', 1)", "indent", "indent(2)", "indent('>', true)", "indent(2, false, true)", "string",
            "e", "escape", "safe", "reverse", "default('q')", "d('q', true)", "center(9)", "truncate(4)", "urlencode",
            "wordwrap(3)", "striptags", "format(1)", "forceescape", "tojson", "first", "last"],
    "num": ["int", "float", "round", "round(1)", "abs", "int(3)", "round(1, 'floor')", "length", "count", "wordcount",
            "sum", "min", "max", "float(2)", "int(base=16)", "filesizeformat", "default(1)"],
    "list": ["list", "sort", "sort(true)", "reverse", "unique", "reverse|list", "unique|list", "map('string')|list",
             "map(attribute='role')|list", "select|list", "reject('none')|list", "batch(2)|list", "slice(2)|list",
             "selectattr('role')|list", "selectattr('role', 'equalto', 'user')|list", "rejectattr('name', 'defined')",
             "dictsort", "items|list", "map('upper')", "select('string')|list", "sort(attribute='role')",
             "groupby('role')", "batch(2, 0)|list", "map(attribute=0)|list", "map('first')|list", "reject|list",
             "selectattr('content', 'string')|list", "map('default', 'x')|list", "map(attribute='a', default=0)|list",
             "sort(case_sensitive=true)", "dictsort(by='value')", "dictsort(reverse=true)", "map('length')|list"],
    "any": ["first", "last", "min", "max", "tojson", "tojson(indent=2)", "string", "join", "join(', ')", "length",
            "join('-', attribute='role')", "pprint", "list", "default('q')", "default(none)", "d(0, true)", "random",
            "tojson(ensure_ascii=true)", "tojson(sort_keys=true)", "tojson(separators=(',', ':'))", "upper", "safe",
            "int", "float", "items", "trim", "sum", "attr('a')", "sum(start=1)", "sum(attribute='a')", "xmlattr",
            "count", "abs", "round", "e", "tojson(indent='\\t')", "replace(1, 2)", "lower", "title", "bool", "nope",
            "max(attribute='role')", "min(case_sensitive=true)", "sort|first", "unique|join", "string|length"],
}  # fmt: skip
TESTS = [
    "defined", "undefined", "none", "string", "number", "integer", "float", "mapping", "sequence", "iterable", "boolean",
    "true", "false", "odd", "even", "upper", "lower", "callable", "divisibleby(2)", "divisibleby 3", "eq(1)", "equalto 'a'",
    "ne 1", "gt(1)", "lt 2", "ge 'a'", "in([1, 'a', none])", "in 'abc'", "sameas(none)", "sameas true", "escaped",
    "filter", "test", "==(1)", "lessthan(2)", "greaterthan 1", "le(1)", "in d", "none or n is odd", "nope",
]  # fmt: skip
METHODS = {
    "str": ["strip()", "lstrip()", "rstrip('b ')", "split()", "split('a')", "split(',', 1)", "rsplit(' ', 1)", "upper()",
            "lower()", "title()", "capitalize()", "swapcase()", "casefold()", "startswith('a')", "endswith(('b', 'c'))",
            "replace('a', 'b')", "replace('a', 'b', 1)", "find('b')", "rfind('b')", "index('a')", "count('a')",
            "count('')", "join(words)", "join(l)", "partition(',')", "rpartition(' ')", "splitlines()",
            "splitlines(true)", "zfill(6)", "ljust(6)", "rjust(6, '*')", "center(7, '-')", "isdigit()", "isalpha()",
            "isspace()", "isupper()", "islower()", "isalnum()", "isnumeric()", "isdecimal()", "isascii()", "format(1, 2)",
            "removeprefix('a')", "removesuffix('b')", "find('a', 1)", "encode()", "expandtabs()", "isidentifier()",
            "split(sep=' ', maxsplit=1)", "istitle()", "nope()", "strip(none)", "startswith('b', 1)", "format(a=1)",
            "split('')", "replace('', 'x')", "__len__()", "format(x)", "isprintable()"],
    "num": ["bit_length()", "is_integer()", "real", "imag", "numerator", "denominator", "conjugate()", "as_integer_ratio()",
            "hex()", "to_bytes(2, 'big')", "__add__(1)"],
    "list": ["count(1)", "index('a')", "index(1)", "copy()", "append(1)", "pop()", "sort()", "insert(0, 1)", "extend([])",
             "reverse()", "clear()", "nope()", "role", "0"],
    "dict": ["get('a')", "get('a', 5)", "get('zz', 5)", "keys()", "values()", "items()", "keys()|list", "values()|list",
             "items()|list", "copy()", "a", "items", "keys", "get", "update({})", "pop('a')", "setdefault('a', 1)", "nope",
             "get(1)", "get(none, 'n')", "get(1.0)", "get('a', default=1)", "fromkeys('ab')", "values()|first"],
}  # fmt: skip
OPERATORS = {
    "str": ["+", "~", "*", "%"],
    "num": ["+", "-", "*", "/", "//", "%", "**", "~"],
    "list": ["+", "*", "~"],
    "bool": ["==", "!=", "<", "<=", ">", ">=", "in", "not in", "and", "or"],
}
OBJECTS = ["range(3)", "range(1, 9, 3)", "range(5, 0, -2)", "range(n)", "namespace(a=1)", "dict(a=1)", "dict(d, b=2)",
           "cycler('a', 'b')", "joiner()", "self", "loop", "m", "m.name", "m.arguments", "m.caller", "m.catch_kwargs",
           "range", "caller", "lipsum", "raise_exception", "range(2)|list", "range('a')", "range(2.0)", "joiner(1)",
           "(1, 'a')", "()", "{}", "{'a': 1, 2: 'b'}", "{1: 2, 1.0: 3}", "{true: 1, none: 2}", "[1, [2, (3,)]]",
           "{'a': x}.a", "(x)", "('a' 'b')", "[].append", "namespace({'a': 1}).a", "m()", "m(1, 2)", "m(a=1)",
           "dict(a=1).items()", "namespace(d).a", "'a'|string is string", "range(3)[1]", "range(3)|last",
           "range(3)|length", "range(4)[1:3]", "1 in range(3)", "m.nope", "strftime_now", "loop.index", "varargs"]  # fmt: skip


def maybe(chance):
    return R.random() < chance


def kind_of(kind):
    return R.choice(["str", "num", "list", "dict", "other"]) if maybe(0.12) else kind


def key():
    return R.choice(["0", "1", "-1", "5", "'a'", "'role'", "'é'", "1.0", "true", "none", "n", "x", "missing", "'keys'", "1.5"])


def edge():
    return R.choice(["", "", "1", "2", "-1", "0", "9", "-9", "none", "n", "z", "1.0", "true", "missing", "x"])


def cut(inner):
    step = R.choice(["", "", "", ":1", ":2", ":-1", ":", ":0", ":none", ":-2", ":yes"])
    return f"{inner}[{edge()}:{edge()}{step}]"


def any_expr(depth):
    return expr(R.choice(["str", "num", "list", "dict", "bool", "other", "object"]), depth)


def expr(kind, depth):
    kind = kind_of(kind)
    if kind == "object":
        own = R.choice(OBJECTS)
        return f"({own}){R.choice(['', '', '[0]', '.a', '|length', '|string', '|list', '[1:]', '|first'])}"
    if kind == "bool":
        return condition(depth)
    if depth <= 0 or maybe(0.25):
        if kind == "str" and maybe(0.4):
            return R.choice(STRINGS)
        if kind == "num" and maybe(0.4):
            return R.choice(NUMBERS)
        if kind == "list" and maybe(0.2):
            return f"[{any_expr(depth - 1)}, {any_expr(depth - 1)}]" if depth > -2 else "[1, 'a']"
        return R.choice(KINDS[kind])
    inner = expr(kind, depth - 1)
    way = R.randrange(9)
    if way == 0 and kind in OPERATORS:
        right = R.choice(["2", "3", "n % 4"]) if "*" in kind else expr(kind, depth - 1)
        operator = R.choice(OPERATORS[kind])
        if operator == "**":
            right = R.choice(["2", "0", "-1", "0.5", "3"])
        if operator == "*" and kind != "num":
            right = R.choice(["2", "0", "-1", "n", "yes", "1.0", "x"])
        return f"{inner} {operator} {right}"
    if way == 1 and kind in METHODS:
        return f"({inner}).{R.choice(METHODS[kind])}"
    if way == 2:
        return f"({inner})|{R.choice(FILTERS.get(kind, FILTERS['any']))}"
    if way == 3:
        return f"({any_expr(depth - 1)})|{R.choice(FILTERS['any'])}"
    if way == 4:
        return cut(f"({inner})")
    if way == 5:
        return f"({inner})[{key()}]"
    if way == 6:
        other = f" else {any_expr(depth - 1)}" if maybe(0.8) else ""
        return f"({inner} if {condition(depth - 1)}{other})"
    if way == 7 and kind == "num":
        return R.choice(["-", "+", "not "]) + f"({inner})"
    return f"({inner})"


def condition(depth):
    inner = any_expr(depth - 1)
    way = R.randrange(4)
    if way == 0:
        return f"({inner} is {R.choice(['', 'not '])}{R.choice(TESTS)})"
    if way == 1:
        kind = R.choice(["str", "num", "num", "list"])
        return f"({expr(kind, depth - 1)} {R.choice(OPERATORS['bool'])} {expr(kind, depth - 1)})"
    if way == 2:
        return f"({inner} {R.choice(OPERATORS['bool'])} {any_expr(depth - 1)})"
    return f"not ({inner})"


def output(depth):
    dash = R.choice(["", "", "", "-"])
    return "{{" + dash + f" {any_expr(depth)} " + R.choice(["", "", "", "-"]) + "}}"


def body(depth):
    return R.choice([" ", "", "\n", "x"]) + piece(depth - 1) + R.choice(["", "", " ", "\n"])


LOOP = ["index", "index0", "revindex", "first", "last", "length", "depth", "depth0", "previtem", "nextitem", "revindex0",
        "cycle('a', 'b')", "changed(i)", "nope", "cycle()"]  # fmt: skip


def loop(depth):
    target, over = R.choice(
        [("i", expr("list", 1)), ("i", expr("str", 0)), ("i", expr("dict", 0)), ("k, v", f"({expr('dict', 0)}).items()"),
         ("i", "range(3)"), ("a, b", "[(1, 2), (3, 4)]"), ("i", any_expr(1)), ("k, v", "d|dictsort"), ("k, v", "nest")]
    )  # fmt: skip
    name = target.split(", ")[-1]
    inside = R.choice(
        ["{{ " + name + " }}", "{{ " + name + "|string }},", "{{ loop." + R.choice(LOOP) + " }}", body(depth),
         "{{ loop }}", "{% if loop.first %}" + body(depth) + "{% endif %}", "{% set q = loop.index %}{{ q }}",
         "{% if loop.index > 1 %}{% break %}{% endif %}{{ " + name + " }}",
         "{% if loop.index0 == 1 %}{% continue %}{% endif %}{{ " + name + " }}"]
    )  # fmt: skip
    only = f" if {R.choice([name, 'loop', name + ' is string', name + ' != 1', 'n', condition(0)])}" if maybe(0.2) else ""
    other = "{% else %}" + body(depth) if maybe(0.15) else ""
    return "{% for " + f"{target} in {over}{only}" + R.choice([" %}", " %}", " -%}"]) + inside + other + "{% endfor %}"


def piece(depth):
    if depth <= 0:
        return output(1)
    ways = [
        lambda: output(2),
        lambda: output(3),
        lambda: loop(depth),
        lambda: "{% set v = " + any_expr(2) + " %}{{ v }}",
        lambda: "{% set a, b = " + expr("list", 1) + " %}{{ a }}{{ b }}",
        lambda: "{% set v %}" + body(depth) + "{% endset %}{{ v" + R.choice(["", "|length", " + x", "|tojson"]) + " }}",
        lambda: "{% if " + condition(2) + " %}" + body(depth) + "{% else %}" + body(depth) + "{% endif %}",
        lambda: "{% set ns = namespace(a=" + any_expr(1) + ") %}{% set ns.a = " + any_expr(1) + " %}{{ ns.a }}",
        lambda: "{% macro m(a, b=" + expr("num", 0) + ") %}" + body(depth) + "{{ a }}|{{ b }}{% endmacro %}{{ m("
        + R.choice(["1", "x, 2", "b=1", "", "a=x", "1, 2, 3", "c=1", "*[1, 2]", "**d"]) + ") }}",
        lambda: "{% macro m() %}{{ caller(1) }}{% endmacro %}{% call(a) m() %}" + body(depth) + "{{ a }}{% endcall %}",
        lambda: "{% filter " + R.choice(["upper", "trim", "indent(2)", "replace('a', 'b')", "nope", "length"]) + " %}"
        + body(depth) + "{% endfilter %}",
        lambda: "{% with a = " + any_expr(1) + ", v = n %}" + body(depth) + "{{ a }}{% endwith %}",
        lambda: "{% generation %}" + body(depth) + "{% endgeneration %}",
        lambda: "{% autoescape " + R.choice(["true", "false", "yes"]) + " %}" + body(depth) + "{% endautoescape %}",
        lambda: "{% raw %}{{ x }} {% endraw %}",
        lambda: "{# " + R.choice(["note", "{{ x }}", "-"]) + " #}\n",
        lambda: "{% block a %}" + body(depth) + "{% endblock %}",
        lambda: R.choice(["{% do 1 %}", "{% include 'a' %}", "{% import 'a' as b %}", "{% extends x %}", "{% debug %}"]),
        lambda: "  {%- if yes %}\n  " + body(depth) + "\n  {%- endif +%}\n ",
        lambda: "{% for i in nest recursive %}{{ i if i is not iterable else loop(i) }}{{ loop.depth }}{% endfor %}",
        lambda: "{{ " + any_expr(2) + " is " + R.choice(TESTS) + " }}",
        lambda: "{{ " + expr("object", 1) + " }}",
        lambda: "{% if " + R.choice(["a", "b", "n"]) + " is defined %}{% set c = " + any_expr(1) + " %}{% endif %}{{ c }}",
        lambda: "{% macro m(a) %}{% endmacro %}{{ " + expr("object", 1) + " }}",
    ]  # fmt: skip
    weights = [5, 5, 4, 2, 1, 2, 2, 2, 2, 1, 1, 1, 0.3, 0.3, 0.3, 0.3, 0.2, 0.3, 0.5, 0.3, 2, 2, 0.5, 0.7]
    return R.choices(ways, weights)[0]()


def rendered(source):
    try:
        return chat_template_utils._compile_jinja_template(source).render(**VARIABLES)
    except Exception:
        return None


def main(count, seed):
    R.seed(int(seed))
    for _ in range(int(count)):
        source = "".join(piece(2) for _ in range(R.choice([1, 1, 1, 2])))
        print(json.dumps({"template": source, "variables": VARIABLES, "text": rendered(source)}))


main(*sys.argv[1:])
