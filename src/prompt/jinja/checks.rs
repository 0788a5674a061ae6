//! Templates and what Jinja2 3.1 makes of them.

use std::time::{Duration, Instant};

use super::*;
use crate::prompt::json;
use crate::prompt::python::Json;

const CONTEXT: &str = r#"{"x": "a b", "s": " \u00a0a\tb\u001c ", "f": 1e-5,
    "d": {"a": 1, "é": "it's \u200b"}, "l": [1, 2.5, null], "big": 1180591620717411303424,
    "huge": 10000000000000000000000000000000000000000}"#;

fn job(max_text: usize) -> Job {
    Job { limits: Limits { max_text, deadline: None }, now: Some(Moment::from_unix(1_772_694_489)) }
}

fn variables(context: &Json) -> Vec<(&str, Value)> {
    let context = context.as_dict().unwrap();
    context.iter().map(|(name, value)| (&**name, value.to_value())).collect()
}

fn rendered(source: &str, job: &Job) -> Result<Rendered, Skip> {
    let context = json::parse(CONTEXT).unwrap();
    Template::compile(source).unwrap().render(variables(&context), job)
}

fn text(source: &str) -> Result<String, Skip> {
    rendered(source, &job(1 << 20)).map(|rendered| rendered.text)
}

#[test]
fn values_and_operators_are_pythons() {
    for (source, expected) in CASES {
        assert_eq!(text(source).as_deref(), Ok(*expected), "{source}");
    }
}

const CASES: &[(&str, &str)] = &[
    (
        "{{ 1e16 }} {{ 1e-7 }} {{ 0.1 + 0.2 }} {{ 3.0 }} {{ f }} {{ f ~ '' }} {{ [f] }}",
        "1e+16 1e-07 0.30000000000000004 3.0 1e-05 1e-05 [1e-05]",
    ),
    (
        "{{ d }} {{ d ~ '' }} {{ d|string }} {{ [d]|join(',') }} {{ (1,) }} {{ {'a': [none, true]} }}",
        r#"{'a': 1, 'é': "it's \u200b"} {'a': 1, 'é': "it's \u200b"} {'a': 1, 'é': "it's \u200b"} {'a': 1, 'é': "it's \u200b"} (1,) {'a': [None, True]}"#,
    ),
    (
        "{{ d|tojson }} {{ l|tojson(indent=2) }} {{ d|tojson(separators=(',', ':'), sort_keys=true) }} {{ x|tojson(ensure_ascii=true) }}",
        "{\"a\": 1, \"é\": \"it's \u{200b}\"} [\n  1,\n  2.5,\n  null\n] {\"a\":1,\"é\":\"it's \u{200b}\"} \"a b\"",
    ),
    (
        "{{ x ~ 1 ~ none ~ 2.5 ~ true }} {{ x + 'b' }} {{ [1] + [2] }} {{ true + 1 }}",
        "a b1None2.5True a bb [1, 2] 2",
    ),
    (
        "{{ '%s=%d %s' % ('a', 3, none) }} {{ -7 % 3 }} {{ '{} {}'.format(x, 1e-7) }}",
        "a=3 None 2 a b 1e-07",
    ),
    (
        "{{ 'abc'[1:] }} {{ 'abc'[::-1] }} {{ l[-1] }} {{ 7 // 2 }} {{ 7 / 2 }} {{ 2 ** 3 }}",
        "bc cba None 3 3.5 8",
    ),
    (
        r#"{{ s.strip() }}|{{ s|trim }}|{{ s.split() }}|{{ 'a,b,c'.split(',', 1) }}|{{ 'a b c'.rsplit(' ', 1) }}|{{ 'a\nb\x0bc\r\nd'.splitlines() }}"#,
        "a\tb|a\tb|['a', 'b']|['a', 'b,c']|['a b', 'c']|['a', 'b', 'c', 'd']",
    ),
    (
        "{{ 'ab'.replace('', '-') }} {{ 'aaa'.replace('a', 'b', 2) }} {{ 'they said'.title() }} {{ 'ab'.zfill(4) }} {{ 'ab'.center(5, '*') }} {{ 'a-b'.partition('-') }} {{ 'ab'.find('b') }}",
        "-a-b- bba They Said 00ab **ab* ('a', '-', 'b') 1",
    ),
    (
        "{% for c in 'héy' %}{{ c }}{{ ',' if not loop.last }}{% endfor %} {% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %} {% for k in d %}{{ k }}{% endfor %}",
        "h,é,y a=1;é=it's \u{200b}; aé",
    ),
    (
        "{% for i in missing %}x{% else %}none{% endfor %} {{ missing is iterable }} {{ none is iterable }} {{ x is sequence }} {{ d is sequence }} {{ true is number }} {{ true is integer }} {{ 1 is true }}",
        "none True False True True True False False",
    ),
    (
        "{{ missing }}{{ [missing] }} {{ none.a is defined }} {{ d.zz is defined }} {{ d.get('zz', 5) }} {{ l|length }} {{ d|items|list }}",
        r#"[Undefined] False False 5 3 [('a', 1), ('é', "it's \u200b")]"#,
    ),
    (
        "{{ ('<a>'|safe) + '<b>' }} {{ '<b>' + ('<a>'|safe) }} {{ ('<a>'|safe) ~ '<b>' }}",
        "<a>&lt;b&gt; &lt;b&gt;<a> <a><b>",
    ),
    (
        r#"{{ 'a\n\nb'|indent(2) }}|{{ 'a\nb'|indent('> ', true) }}|{{ 2.5|round }} {{ 3.14159|round(2) }} {{ '42'|int + 1 }} {{ 'x'|int(7) }} {{ '3.5'|float }}"#,
        "a\n\n  b|> a\n> b|2.0 3.14 43 7 3.5",
    ),
    (
        "{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}{% set q %}b{{ x }}{% endset %}{{ q + 'a' }}",
        "3ba ba",
    ),
    (
        "{% macro w() %}<{{ caller('u') }}>{% endmacro %}{% macro m(a, b='d') %}[{{ a }}|{{ b }}]{% endmacro %}{{ m(1) }}{{ m('x' + 'y', b=2) }}{% call(u) w() %}{{ u }}{% endcall %}",
        "[1|d][xy|2]<u>",
    ),
    (
        "{{ big }} {{ big + 1 }} {{ [huge] }} {{ huge|tojson }} {{ huge ~ '' }}",
        "1180591620717411303424 1180591620717411303425 [10000000000000000000000000000000000000000] 10000000000000000000000000000000000000000 10000000000000000000000000000000000000000",
    ),
    (
        "{{ x|length - 1 }} {{ not l|length > 2 }} {{ x|trim + s|trim }} {{ (x ~ s)|length }} {{ x ~ s|length }} {{ x[0 + 0:1 + 0] }} {{ 'q' if x is not none else x + 1 }}",
        "2 False a ba\tb 10 a b7 a q",
    ),
    (
        "{{ 'y' if l|select('none') and missing|items }} {{ (l|reject('none'))[0] is defined }} {{ l|map('string')|join('+') }} {% set i = l|select %}{{ i|first }} {{ i|list }} {{ i|list }} {{ [] == l|batch(2) }}",
        "y False 1+2.5+None 1 [2.5] [] False",
    ),
    (
        "{% for x in l|reverse %}{{ loop.revindex }}/{{ loop.length }}:{{ x }} {% endfor %}{{ x|reverse }} {{ l|reverse is iterable }} {{ l|reverse is sequence }}",
        "3/3:None 2/3:2.5 1/3:1 b a True False",
    ),
    (
        "{{ d.keys() }} {{ d.values()|list }} {{ d.keys()|length }} {{ 'a' in d.keys() }} {{ d.keys()[0] is defined }} {{ {'b': 1}.items() }}",
        r#"dict_keys(['a', 'é']) [1, "it's \u200b"] 2 True False dict_items([('b', 1)])"#,
    ),
    (
        "{% for g in [{'a': 1, 'b': 'x'}, {'a': 0}]|groupby('a') %}{{ g.grouper }}{{ g.list|length }}{{ g }}{% endfor %}",
        "01(0, [{'a': 0}])11(1, [{'a': 1, 'b': 'x'}])",
    ),
    (
        "{{ missing|default('q', boolean=true) }} {{ ''|d(default_value='e', boolean=true) }} {{ [{'a': {'b': 1}}]|join(',', attribute='a.b') }} {{ [{'a': 1}, {'a': 2}]|join(', ', 'a') }} {{ [2, 1]|sort(true) }} {{ {'B': 1, 'a': 2}|dictsort(true) }} {{ [3, 1]|min }}",
        "q e 1 1, 2 [2, 1] [('B', 1), ('a', 2)] 1",
    ),
    (
        "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.current }}{{ c.next() }}{% set j = joiner() %}{{ j() }}x{{ j() }}y{% set k = joiner(sep='|') %}{{ k() }}{{ k() }}",
        "abaax, y|",
    ),
    (
        "{{ 'ΑΣ'.capitalize() }} {{ 'ǆx ßa'.title() }} {{ 'ﬁn'|capitalize }} {{ true|round }} {{ '%s-%d'|format('a', 2) }} {{ ' x '|trim(chars=' ') }}",
        "Ας ǅx Ssa Fin 1 a-2 x",
    ),
    (
        "a\r\n  {%- if true -%}  b  {%- endif +%}  c\n  {# note #}\n   {% if true %}\n   d\n   {% endif %}\ne\n",
        "ab  c\n   d\ne",
    ),
];

#[test]
fn what_python_refuses_is_refused() {
    for source in [
        "{{ x + 1 }}",
        "{{ x + none }}",
        "{{ ('<a>'|safe) + none }}",
        "{{ missing.a }}",
        "{{ missing + 'a' }}",
        "{% for i in none %}{% endfor %}",
        "{% for i in 5 %}{% endfor %}",
        "{{ x in none }}",
        "{{ none|length }}",
        "{{ x|items }}",
        "{{ missing|tojson }}",
        "{{ l.append(1) }}",
        "{{ x.index('z') }}",
        "{{ ','.join([1]) }}",
        "{{ raise_exception('no') }}",
        "{{ l|select|length }}",
        "{{ l|select|last }}",
        "{{ l|map('string')|tojson }}",
        "{{ l + l|reject('none') }}",
        "{{ d.keys() + l }}",
        "{{ d.items()|tojson }}",
        "{{ l|indent }}",
        "{{ x|default(1, 2, 3) }}",
        "{{ cycler() }}",
        "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    ] {
        assert_eq!(text(source), Err(Skip::Refused), "{source}");
    }
}

#[test]
fn what_is_not_reproduced_says_so() {
    for source in [
        "{{ d.items }}",
        "{{ x|wordcount }}",
        "{{ x.encode() }}",
        "{{ huge + 1 }}",
        "{{ l|select }}",
        "{{ '%r' % x }}",
        "{{ '{:%}'.format(0.5) }}",
        "{{ x.find('a', 1) }}",
        "{% for c in x %}{% if c %}{% continue %}{% endif %}{% else %}e{% endfor %}",
        "{{ strftime_now('%j') }}",
        "{% macro m(a) %}{{ varargs }}{% endmacro %}{{ m(1) }}",
    ] {
        assert_eq!(text(source), Err(Skip::Unsupported), "{source}");
    }
}

#[test]
fn a_rendering_ends_by_size_fuel_and_deadline() {
    let rows = "{% for i in range(1000) %}{% for j in range(100) %}ab{% endfor %}{% endfor %}";
    let cut = rendered(rows, &job(1001)).unwrap();
    assert!(cut.cut && cut.text.len() == 1001 && cut.text.starts_with("abab"));
    assert!(!rendered("ab", &job(2)).unwrap().cut);
    let doubling = "{% set ns = namespace(t=x) %}{% for i in range(99) %}\
                    {% set ns.t = ns.t + ns.t %}{% endfor %}";
    assert_eq!(text(doubling), Err(Skip::Deadline));
    let mut late = job(1 << 30);
    late.limits.deadline = Instant::now().checked_sub(Duration::from_secs(1));
    assert_eq!(rendered(rows, &late).map(|_| ()), Err(Skip::Deadline));
}

#[test]
fn a_template_that_asks_for_the_time_is_dated() {
    let rendered = rendered("{{ strftime_now('%d %b %Y, %A %-d %H:%M:%S') }}", &job(99)).unwrap();
    assert_eq!(rendered.text, "05 Mar 2026, Thursday 5 07:08:09");
    assert!(rendered.dated);
    let leap = Moment::from_unix(951_782_400);
    assert_eq!(leap.strftime("%Y-%m-%d %a").unwrap(), "2000-02-29 Tue");
    let before = Moment::from_unix(-1);
    assert_eq!(before.strftime("%F %T %p").unwrap(), "1969-12-31 23:59:59 PM");
}

#[test]
fn content_format_is_found_by_a_loop_over_the_content() {
    let parts = ContentFormat::Parts;
    let string = ContentFormat::String;
    for (source, format) in [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", string),
        ("{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}", parts),
        (
            "{% for m in messages %}{% for c in m['content']|reverse %}{% endfor %}{% endfor %}",
            parts,
        ),
        ("{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{% endfor %}", string),
        (
            "{% set all = messages[1:] %}{% for m in all %}{% for c in m.content %}{% endfor %}\
             {% endfor %}",
            parts,
        ),
        ("{% for c in content %}{% endfor %}", parts),
        ("{% macro m(content) %}{% for c in content %}{% endfor %}{% endmacro %}", string),
        (
            "{% macro m(v) %}{% for c in v %}{% endfor %}{% endmacro %}\
             {% for m2 in messages %}{{ m(m2.content) }}{% endfor %}",
            parts,
        ),
        (
            "{% set ns = namespace() %}{% set ns.a = messages %}{% for m in messages %}\
             {% for c in m.content %}{% endfor %}{% endfor %}",
            string,
        ),
    ] {
        assert_eq!(Template::compile(source).unwrap().format, format, "{source}");
    }
}

#[test]
fn names_are_taken_from_outside_as_jinja2_decides() {
    let source = "{% set own = 1 %}{{ own }}{{ outer }}{% set late = late|default(1) %}\
                  {% if flag %}{% set branch = 1 %}{% endif %}\
                  {% for item in list %}{{ item }}{{ loop.index }}{{ after }}{% set inner = 1 %}{{ inner }}\
                  {% endfor %}{{ inner }}{% set after = 1 %}\
                  {% macro m(a, b=c) %}{{ a }}{{ d }}{% endmacro %}{{ m(range(1)) }}\
                  {% with w = v %}{{ w }}{% endwith %}{{ namespace() }}";
    let template = Template::compile(source).unwrap();
    let taken = |name: &&str| template.takes(name);
    let all = [
        "own",
        "outer",
        "late",
        "flag",
        "branch",
        "item",
        "list",
        "loop",
        "after",
        "inner",
        "m",
        "a",
        "b",
        "c",
        "d",
        "w",
        "v",
        "range",
        "namespace",
    ];
    let outside: Vec<&str> = all.into_iter().filter(taken).collect();
    assert_eq!(outside, ["outer", "late", "flag", "branch", "list", "inner", "c", "d", "v"]);
}

#[test]
fn rewriting_keeps_what_operators_bind_to() {
    let parsed = |source: &str| {
        let syntax = SyntaxConfig::default();
        let tree = parse(source, NAME, syntax).unwrap();
        rewrite::operators(source, &tree)
    };
    for (source, expected) in [
        ("{{ a+b~c }}", "{{ (a)|__add((b)|__concat(c)) }}"),
        ("{{ a + b + c }}", "{{ ((a )|__add( b) )|__add( c) }}"),
        ("{{ (a+b)|f + c.d(e+1)[0] }}", "{{ (((a)|__add(b))|f )|__add( c.d((e)|__add(1))[0]) }}"),
        ("{% for x in a+b %}{% endfor %}", "{% for x in ((a)|__add(b))|__each %}{% endfor %}"),
        (
            "{% for x in a.b.c() if d %}{% endfor %}",
            "{% for x in (a.b.c())|__each if d %}{% endfor %}",
        ),
        ("{% for x in a is not b %}{% endfor %}", "{% for x in (a is not b)|__each %}{% endfor %}"),
    ] {
        assert_eq!(parsed(source), expected, "{source}");
    }
    let marked = "{%- generation -%}a{% if x %}{% endgeneration %}\r\nb\r";
    assert_eq!(rewrite::normalize(marked), "{%- with -%}a{% if x %}{% endwith %}\nb\n");
}
