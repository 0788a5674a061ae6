//! Random requests and what the engine's own code made of them: `make parity`.
//!
//! `PARITY_DIR` names a folder with `models.json` and `answers.jsonl`, as `t/parity/engine.py` takes
//! and writes them. Without it the test says that it is skipped.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;

use ngx_http_kvc_aware_module::prompt::{Endpoint, Limits, ModelSpec, Models};
use ngx_http_kvc_aware_module::types::Skip;
use serde_json::Value;

const LIMITS: Limits = Limits { max_text: 16 << 20, deadline: None };
const DIFFERENT: &str = "DIFFERENT";
const ONLY_WE: &str = "refused only by us";
const EQUAL: &str = "equal";
/// Of each kind that many are listed.
const LISTED: usize = 12;

fn models(list: &Value) -> Models {
    let spec = |model: &Value| ModelSpec {
        name: model["name"].as_str().unwrap().to_owned(),
        dir: model["dir"].as_str().unwrap().into(),
        template: model["template"].as_str().map(PathBuf::from),
        ..ModelSpec::default()
    };
    let models = Models::new(list.as_array().unwrap().iter().map(spec).collect());
    models.load_all(|name, loaded| {
        if let Err(error) = loaded {
            println!("\"{name}\" is not loaded: {error}");
        }
    });
    models
}

/// What became of a case, and how where that is to be listed.
fn outcome(models: &Models, case: &Value) -> (String, Option<String>) {
    let endpoint = Endpoint::from_path(case["path"].as_str().unwrap()).unwrap();
    let body = case["body"].as_str().unwrap().as_bytes();
    let engine: Option<Vec<u64>> =
        case["ids"].as_array().map(|ids| ids.iter().map(|id| id.as_u64().unwrap()).collect());
    let plain = |outcome: &str| (outcome.to_owned(), None);
    match (models.tokenize(endpoint, body, &LIMITS, true, |_| ()).result, engine) {
        (Err(Skip::Refused | Skip::BadJson), None) => plain("refused by both"),
        (Err(skip @ (Skip::Refused | Skip::BadJson)), Some(_)) => {
            (ONLY_WE.to_owned(), Some(skip.to_string()))
        }
        (Err(skip), _) => plain(&format!("skipped: {skip}")),
        (Ok(tokens), _) if tokens.exact.reason().is_some() => {
            plain(&format!("not exact: {}", tokens.exact))
        }
        (Ok(_), None) => ("refused only by the engine".to_owned(), Some(case["error"].to_string())),
        (Ok(tokens), Some(ids)) if tokens.ids.iter().map(|id| u64::from(*id)).eq(ids.clone()) => {
            plain(EQUAL)
        }
        (Ok(tokens), Some(ids)) => {
            let same = tokens.ids.iter().zip(&ids).take_while(|(a, b)| u64::from(**a) == **b);
            let at = same.count();
            let how = format!(
                "at {at}: {:?} for {:?}, text {:?}",
                tokens.ids.iter().skip(at).take(8).collect::<Vec<_>>(),
                ids.iter().skip(at).take(8).collect::<Vec<_>>(),
                tokens.text.unwrap_or_default(),
            );
            (DIFFERENT.to_owned(), Some(how))
        }
    }
}

#[test]
fn requests_come_to_the_tokens_of_the_engine() {
    let Some(dir) = std::env::var_os("PARITY_DIR").map(PathBuf::from) else {
        println!("skipped: PARITY_DIR is not set");
        return;
    };
    let models =
        models(&serde_json::from_slice(&fs::read(dir.join("models.json")).unwrap()).unwrap());
    let mut counts: BTreeMap<String, BTreeMap<String, usize>> = BTreeMap::new();
    let mut paths = BTreeSet::new();
    let mut listed: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for line in fs::read_to_string(dir.join("answers.jsonl")).unwrap().lines() {
        let case: Value = serde_json::from_str(line).unwrap();
        let path = case["path"].as_str().unwrap().to_owned();
        let (outcome, how) = outcome(&models, &case);
        *counts.entry(outcome.clone()).or_default().entry(path.clone()).or_default() += 1;
        paths.insert(path);
        if let Some(how) = how {
            let how =
                format!("{} {}\n    {}\n    {how}", case["model"], case["path"], case["body"]);
            listed.entry(outcome).or_default().push(how);
        }
    }
    for (outcome, cases) in &listed {
        println!("{outcome}:");
        cases.iter().take(LISTED).for_each(|case| println!("  {case}"));
    }
    println!(
        "{:32}{:>8}  {}",
        "",
        "all",
        paths.iter().map(String::as_str).collect::<Vec<_>>().join("  ")
    );
    for (outcome, counts) in &counts {
        print!("{outcome:32}{:8}", counts.values().sum::<usize>());
        paths.iter().for_each(|path| print!("  {:1$}", counts.get(path).unwrap_or(&0), path.len()));
        println!();
    }
    assert!(counts.contains_key(EQUAL), "no request came to tokens on both sides");
    for kind in [DIFFERENT, ONLY_WE] {
        assert!(!counts.contains_key(kind), "{kind}: {:?}", counts[kind]);
    }
}
