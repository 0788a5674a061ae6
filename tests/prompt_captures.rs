//! The captured requests to real engines: our token ids must be those that the engine prefilled.
//!
//! `TOKENIZERS_DIR` names a folder of tokenizers (`scripts/fetch-test-tokenizers`). Without it the
//! test says that it is skipped.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use ngx_http_kvc_aware_module::prompt::{Endpoint, Exact, Limits, ModelSpec, Models};
use serde_json::Value;

const LIMITS: Limits = Limits { max_text: 16 << 20, deadline: None };

/// The models of the captures and the folders of their tokenizers.
const MODELS: [(&str, &str); 5] = [
    ("deepseek-tiny", "deepseek_v3"),
    ("gemma3-tiny", "gemma3"),
    ("gptoss-tiny", "gptoss"),
    ("qwen2vl-tiny", "qwen3"),
    ("qwen3-tiny", "qwen3"),
];

/// 2026-12-01: prompts of gpt-oss hold the day.
const CAPTURED: i64 = 1_796_083_200;

/// The adapters of the last one.
const ADAPTERS: [&str; 2] = ["lora-a", "lora-b"];

/// What Qwen's models put before an image.
const IMAGE_START: u64 = 151_652;

fn captures() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("t/captures");
    let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let is_capture = |file: &PathBuf| {
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        name.ends_with(".jsonl")
    };
    let mut files: Vec<_> = files.filter(is_capture).collect();
    files.sort();
    files
}

fn lines(file: &Path) -> Vec<Value> {
    let text = fs::read_to_string(file).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn models() -> Option<Models> {
    let Some(tokenizers) = std::env::var_os("TOKENIZERS_DIR") else {
        println!("skipped: TOKENIZERS_DIR is not set");
        return None;
    };
    let mut specs = MODELS.map(|(name, folder)| ModelSpec {
        name: name.to_owned(),
        dir: Path::new(&tokenizers).join(folder),
        ..ModelSpec::default()
    });
    specs[3].template = Some(Path::new(env!("CARGO_MANIFEST_DIR")).join("t/models/vision.jinja"));
    specs[4].loras = ADAPTERS.map(str::to_owned).to_vec();
    let models = Models::new(specs.to_vec()).at_time(CAPTURED);
    models.load_all(|_, result| {
        result.unwrap();
    });
    Some(models)
}

/// What the engine prefilled: the first prompt's ids that `render` tells, else `tokenize`, else those
/// of the request itself.
fn engine_ids(request: &Value) -> Option<Vec<u64>> {
    let render = &request["render"];
    let told = [&render["json"], &render["json"][0], &request["tokenize"]["json"]];
    let told = told
        .iter()
        .find_map(|told| told["token_ids"].as_array().or_else(|| told["tokens"].as_array()));
    let ids = told.or_else(|| request["body"]["prompt"].as_array())?;
    Some(ids.iter().map(|id| id.as_u64().unwrap()).collect())
}

#[test]
fn token_ids_are_those_of_the_engine() {
    let Some(models) = models() else { return };
    let (mut equal, mut differ, mut adapters, mut begun) = (0, Vec::new(), 0, 0);
    for file in captures() {
        let lines = lines(&file);
        let refused: BTreeSet<&str> = lines
            .iter()
            .filter(|line| line["kind"] == "response" && line["status"] != 200)
            .map(|line| line["id"].as_str().unwrap())
            .collect();
        for request in lines.iter().filter(|line| line["kind"] == "request") {
            let (id, path) = (request["id"].as_str().unwrap(), request["path"].as_str().unwrap());
            let Some(endpoint) = Endpoint::from_path(path) else { continue };
            let body = request["body"].to_string();
            let what = format!("{} {id}", file.file_name().unwrap().to_string_lossy());
            let result = models.tokenize(endpoint, body.as_bytes(), &LIMITS, false, |_| ()).result;
            if refused.contains(id) {
                continue;
            }
            let engine = engine_ids(request).unwrap_or_else(|| panic!("{what}: no ids"));
            match result {
                // Of a prompt with images the tokens before the first of them.
                Ok(tokens) if tokens.exact == Exact::No("multimodal") => {
                    let image = engine.iter().position(|id| *id == IMAGE_START).unwrap();
                    let ids = tokens.ids.iter().map(|id| u64::from(*id));
                    // A line end before an image may become one with what follows.
                    if ids.clone().eq(engine[..image].to_vec())
                        || ids.eq(engine[..image - 1].to_vec())
                    {
                        begun += 1;
                    } else {
                        differ.push(format!("{what}: {} tokens before an image", tokens.ids.len()));
                    }
                }
                Ok(tokens) if tokens.ids.iter().map(|id| u64::from(*id)).eq(engine) => {
                    equal += 1;
                    let model = request["body"]["model"].as_str().unwrap();
                    let adapter = ADAPTERS.contains(&model).then_some(model);
                    assert_eq!(tokens.lora.as_deref(), adapter, "{what}");
                    adapters += usize::from(adapter.is_some());
                    let salt = request["body"]["cache_salt"].as_str();
                    assert_eq!(tokens.salt.as_deref(), salt, "{what}");
                }
                Ok(tokens) => differ.push(format!("{what}: {} tokens differ", tokens.ids.len())),
                Err(skip) => differ.push(format!("{what}: {skip}")),
            }
        }
    }
    println!(
        "{equal} equal, {begun} up to an image, {adapters} of them for adapters, {} differ",
        differ.len()
    );
    differ.iter().for_each(|line| println!("  {line}"));
    assert!(differ.is_empty() && equal > 0 && begun == 7);
}
