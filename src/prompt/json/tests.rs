use proptest::prelude::*;
use serde_json::Value;

use super::*;
use crate::prompt::repr::Dumps;

fn dumped(text: &str) -> Result<String, Fault> {
    parse(text).map(|json| Dumps::default().text(&json.to_value()).unwrap())
}

#[test]
fn pythons_json_is_read() {
    for (text, expected) in [
        (" { \"a\" : 1 , \"b\" : [ ] } ", r#"{"a": 1, "b": []}"#),
        (r#"{"a": 1, "b": 2, "a": 3}"#, r#"{"a": 3, "b": 2}"#),
        ("[NaN, Infinity, -Infinity, 1e400]", "[NaN, Infinity, -Infinity, Infinity]"),
        ("[1.50, 1e5, 1E-7, -0, -0.0]", "[1.5, 100000.0, 1e-07, 0, -0.0]"),
        (
            "[9223372036854775808, -170141183460469231731687303715884105729]",
            "[9223372036854775808, -170141183460469231731687303715884105729]",
        ),
        (r#""\u00e9\ud83d\ude42\/\b\u0000""#, "\"é🙂/\\b\\u0000\""),
    ] {
        assert_eq!(dumped(text).as_deref(), Ok(expected), "{text}");
    }
}

#[test]
fn faults_are_named() {
    let deep = "[".repeat(1_000_000);
    let dense = format!("[{}]", vec!["[]"; 200_000].join(","));
    let digits = "1".repeat(4301);
    for (text, fault) in [
        ("", Fault::Syntax),
        ("[1,]", Fault::Syntax),
        ("{\"a\" 1}", Fault::Syntax),
        ("01", Fault::Syntax),
        ("1.", Fault::Syntax),
        ("+1", Fault::Syntax),
        ("\"a\nb\"", Fault::Syntax),
        (r#""\x""#, Fault::Syntax),
        ("[] []", Fault::Syntax),
        (&digits, Fault::Syntax),
        (r#""\ud800""#, Fault::Surrogate),
        (r#""\udc00\ud800""#, Fault::Surrogate),
        (&deep, Fault::Depth),
        (&dense, Fault::Dense),
    ] {
        assert_eq!(dumped(text), Err(fault), "{text:.40}");
    }
}

#[test]
fn fields_are_found_without_reading_the_rest() {
    let text = r#" {"x": [1, {"a": "]}"}], "a": 1, "\u0062": "s" , "a" : null , "\ud800": 1} "#;
    assert_eq!(fields(text, &["a", "b", "c"]), Ok([Some("null"), Some(r#""s""#), None]));
    assert_eq!(fields("{}", &["a"]), Ok([None]));
    assert_eq!(fields("[]", &["a"]), Err(Fault::Syntax));
    assert_eq!(fields(r#"{"a": 1, "b": tru}"#, &["a"]), Err(Fault::Syntax));
    assert_eq!(fields(r#"{"a": 1} x"#, &["a"]), Err(Fault::Syntax));
    let deep = format!("{{\"a\": {}", "[".repeat(1_000_000));
    assert_eq!(fields(&deep, &["a"]), Err(Fault::Depth));
}

#[test]
fn ids_are_read_as_they_are_or_not_at_all() {
    assert_eq!(parse_ids(" [1, 2 ,4294967295] "), Some(vec![1, 2, u32::MAX]));
    assert_eq!(parse_ids("[]"), Some(vec![]));
    for text in ["[1,]", "[-1]", "[1.0]", "[4294967296]", "[1,[2]]", "[\"1\"]", "1", "[+1]"] {
        assert_eq!(parse_ids(text), None, "{text}");
    }
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i16>().prop_map(Value::from),
        // Short, so that the other reader, which rounds, reads them exactly when two are joined.
        any::<i16>().prop_map(|int| Value::from(f64::from(int) / 8.0)),
        any::<String>().prop_map(Value::from),
        "[a-c]{0,2}".prop_map(Value::from),
    ];
    leaf.prop_recursive(5, 60, 20, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..20).prop_map(Value::from),
            prop::collection::vec(("[a-z]{0,2}", inner), 0..20)
                .prop_map(|entries| Value::Object(entries.into_iter().collect())),
        ]
    })
}

proptest! {
    /// Written and read again, with or without white space, a value is what it was.
    #[test]
    fn what_is_written_is_read(value in any_json()) {
        for text in [value.to_string(), serde_json::to_string_pretty(&value).unwrap()] {
            let back: Value = serde_json::from_str(&dumped(&text).unwrap()).unwrap();
            prop_assert_eq!(&back, &value);
            let wrapped = format!("{{\"other\": 1, \"wanted\": {text}}}");
            prop_assert_eq!(fields(&wrapped, &["wanted"]), Ok([Some(text.as_str())]));
        }
    }

    /// What another reader takes is taken, and what it does not take is not, unless only Python does.
    #[test]
    fn damaged_text_is_taken_by_both_or_none(
        value in any_json(),
        at in any::<prop::sample::Index>(),
        with in prop::sample::select(vec!["", "\"", "\\", ",", ":", "[", "}", "0", "-", ".", " ", "n"]),
    ) {
        let text = value.to_string();
        let mut at = at.index(text.len() + 1);
        while !text.is_char_boundary(at) {
            at -= 1;
        }
        let end = text[at..].chars().next().map_or(at, |c| at + c.len_utf8());
        let text = format!("{}{with}{}", &text[..at], &text[end..]);
        match serde_json::from_str::<Value>(&text) {
            Ok(theirs) => {
                let ours: Value = serde_json::from_str(&dumped(&text).unwrap()).unwrap();
                prop_assert_eq!(ours, theirs);
            }
            Err(_) => prop_assert!(matches!(parse(&text), Err(Fault::Syntax | Fault::Surrogate)), "{}", text),
        }
    }
}
