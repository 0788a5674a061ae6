//! Templates and what Jinja2 made of them.
//!
//! `JINJA_CASES` names a file with a JSON object a line: `template`, `variables` and `text`, which is
//! null where Jinja2 refused. Without it the test says that it is skipped.

use std::collections::BTreeMap;
use std::fs;

use super::*;
use crate::prompt::json;
use crate::prompt::python::Json;

const EQUAL: &str = "equal";
const ONLY_WE: &str = "refused only by us";
const DIFFERENT: &str = "DIFFERENT";

/// No reason: the template is not compiled, which keeps its model from being loaded.
fn ours(case: &Json) -> Result<String, Option<Skip>> {
    let case = case.as_dict().unwrap();
    let source = case.get("template").and_then(Json::as_str).unwrap();
    let variables = case.get("variables").and_then(Json::as_dict).unwrap();
    let variables = variables.iter().map(|(name, value)| (&**name, value.to_value())).collect();
    let limits = Limits { max_text: 1 << 20, deadline: None };
    let job = Job { limits, now: Some(Moment::from_unix(1_772_694_489)) };
    let template = Template::compile(source).map_err(|_| None)?;
    template.render(variables, &job).map(|rendered| rendered.text).map_err(Some)
}

/// What became of one case. What is not compiled or skipped is named to the user; a text that Jinja2
/// does not make is not.
fn judge(ours: &Result<String, Option<Skip>>, jinja2: Option<&str>) -> String {
    match (ours, jinja2) {
        (Ok(text), Some(expected)) if text == expected => EQUAL.to_owned(),
        (Err(None | Some(Skip::Refused)), None) => "refused by both".to_owned(),
        (Err(None), Some(_)) => "not compiled".to_owned(),
        (Err(Some(Skip::Refused)), Some(_)) => ONLY_WE.to_owned(),
        (Err(Some(skip)), _) => format!("skipped: {skip}"),
        (Ok(_), None) => "refused only by Jinja2".to_owned(),
        (Ok(_), Some(_)) => DIFFERENT.to_owned(),
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
        if [ONLY_WE, DIFFERENT].contains(&verdict.as_str()) {
            let source = case.as_dict().unwrap().get("template").and_then(Json::as_str);
            println!("{verdict}: {:?}\n  {ours:?}\n  {jinja2:?}", source.unwrap());
        }
        *counts.entry(verdict).or_insert(0) += 1;
    }
    counts.iter().for_each(|(verdict, count)| println!("{verdict:32}{count:8}"));
    assert!(counts.contains_key(EQUAL), "no template came to a text on both sides");
    for verdict in [ONLY_WE, DIFFERENT] {
        assert!(!counts.contains_key(verdict), "{verdict}: {}", counts[verdict]);
    }
}
