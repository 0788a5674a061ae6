//! Templates and what Jinja2 made of them.
//!
//! `JINJA_CASES` names a file with a JSON object a line: `template`, `variables` and `text`, which is
//! null where Jinja2 refused. Without it the test says that it is skipped.

use std::collections::BTreeMap;
use std::fs;

use super::*;
use crate::prompt::json;
use crate::prompt::python::Json;

/// What became of one case. What is refused or not reproduced is named to the user; a text that
/// Jinja2 does not make is not.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Verdict {
    Equal,
    NotReproduced,
    RefusedAlone,
    RenderedAlone,
    Different,
}

fn ours(case: &Json) -> Result<String, Skip> {
    let case = case.as_dict().unwrap();
    let source = case.get("template").and_then(Json::as_str).unwrap();
    let variables = case.get("variables").and_then(Json::as_dict).unwrap();
    let variables = variables.iter().map(|(name, value)| (&**name, value.to_value())).collect();
    let limits = Limits { max_text: 1 << 20, deadline: None };
    let job = Job { limits, now: Some(Moment::from_unix(1_772_694_489)) };
    let template = Template::compile(source).map_err(|_| Skip::Refused)?;
    template.render(variables, &job).map(|rendered| rendered.text)
}

fn judge(ours: &Result<String, Skip>, jinja2: Option<&str>) -> Verdict {
    match (ours, jinja2) {
        (Ok(text), Some(expected)) if text == expected => Verdict::Equal,
        (Err(Skip::Refused), None) => Verdict::Equal,
        (Err(Skip::Refused), Some(_)) => Verdict::RefusedAlone,
        (Err(_), _) => Verdict::NotReproduced,
        (Ok(_), None) => Verdict::RenderedAlone,
        (Ok(_), Some(_)) => Verdict::Different,
    }
}

#[test]
fn templates_are_rendered_as_jinja2_renders_them() {
    let Ok(path) = std::env::var("JINJA_CASES") else {
        println!("skipped: JINJA_CASES is not set");
        return;
    };
    let mut counts = BTreeMap::new();
    for line in fs::read_to_string(path).unwrap().split('\n').filter(|line| !line.is_empty()) {
        let case = json::parse(line).unwrap();
        let jinja2 = case.as_dict().unwrap().get("text").and_then(Json::as_str);
        let ours = ours(&case);
        let verdict = judge(&ours, jinja2);
        if verdict >= Verdict::RefusedAlone {
            println!("{verdict:?}: {ours:?} {line}");
        }
        *counts.entry(verdict).or_insert(0) += 1;
    }
    println!("{counts:?}");
    assert!(counts.contains_key(&Verdict::Equal));
    assert!(!counts.contains_key(&Verdict::Different), "{counts:?}");
}
