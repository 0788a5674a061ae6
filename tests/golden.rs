//! Requests and what the engine made of them: prompt text and token ids must be equal.
//!
//! `GOLDEN_DIR` names the folder of cases, `TOKENIZERS_DIR` one with a folder for each tokenizer
//! (`scripts/fetch-test-tokenizers`). Without them the tests say that they are skipped.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use ngx_http_kvc_aware_module::prompt::{
    Endpoint, Limits, ModelSpec, Models, Tokens, prepare_chat,
};
use ngx_http_kvc_aware_module::types::Skip;
use serde::de::IgnoredAny;
use serde_json::{Value, json};

/// 2026-03-05 07:08:09, the time of the cases.
const NOW: i64 = 1_772_694_489;

const LIMITS: Limits = Limits { max_text: 16 << 20, deadline: None };

fn folder(variable: &str) -> Option<PathBuf> {
    let folder = std::env::var_os(variable).map(PathBuf::from);
    if folder.is_none() {
        println!("skipped: {variable} is not set");
    }
    folder
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// One line of a file of cases.
struct Case {
    fields: Value,
    /// The request as it is written: a parsed one would lose digits.
    request: String,
}

impl Case {
    fn read(line: &str) -> Case {
        let key = "\"request\":";
        let request = line.find(key).map_or("", |at| &line[at + key.len()..]);
        let mut values = serde_json::Deserializer::from_str(request).into_iter::<IgnoredAny>();
        let len = values.next().map_or(0, |_| values.byte_offset());
        Case { fields: parse(line), request: request[..len].to_owned() }
    }

    fn id(&self) -> &str {
        self.fields["id"].as_str().unwrap()
    }
}

impl std::ops::Index<&str> for Case {
    type Output = Value;

    fn index(&self, field: &str) -> &Value {
        &self.fields[field]
    }
}

fn cases(path: &Path) -> Vec<Case> {
    let lines = read(path);
    lines.split('\n').filter(|line| !line.is_empty()).map(Case::read).collect()
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{folder:?}: {error}"));
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "jsonl"));
    files.sort();
    files
}

/// The Unix seconds of `YYYY-MM-DDTHH:MM:SS`, whose parts from the right may be missing.
fn moment(text: &Value) -> i64 {
    let Some(text) = text.as_str() else { return NOW };
    let parts: Vec<i64> = text.split(['-', 'T', ':']).map(|part| part.parse().unwrap()).collect();
    let part = |at: usize, least| parts.get(at).copied().unwrap_or(least);
    let (year, month) = (part(0, 1970), part(1, 1));
    let is_leap = |year| year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let of_month = |month| match month {
        2 => 28 + i64::from(is_leap(year)),
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    };
    let years: i64 = (1970..year).map(|year| 365 + i64::from(is_leap(year))).sum();
    let days = years + (1..month).map(of_month).sum::<i64>() + part(2, 1) - 1;
    ((days * 24 + part(3, 0)) * 60 + part(4, 0)) * 60 + part(5, 0)
}

fn parse(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text:.200}"))
}

/// The folder of a tokenizer named `npm:@lenml/tokenizer-NAME@VERSION` or `npm:PACKAGE@VERSION`.
fn tokenizer_folder(tokenizers: &Path, tokenizer: &str) -> PathBuf {
    let name = tokenizer.strip_prefix("npm:").unwrap_or(tokenizer);
    let name = name.rsplit_once('@').map_or(name, |(name, _)| name);
    let name = name.rsplit_once("tokenizer-").map_or(name, |(_, name)| name);
    let kept = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    tokenizers.join(name.replace(|c| !kept(c), "_"))
}

/// A model folder of its own that takes its tokenizer from another.
struct Model {
    folder: PathBuf,
    models: Models,
}

impl Model {
    /// The text of an error says why the model cannot be loaded.
    fn new(
        name: &str,
        tokenizer: &Path,
        config: &Value,
        template: Option<&Path>,
        now: i64,
    ) -> Result<Model, String> {
        let folder = std::env::temp_dir().join(format!("golden-{}-{name}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let write = |file: &str, text: String| fs::write(folder.join(file), text).unwrap();
        let json = tokenizer.join("tokenizer.json");
        std::os::unix::fs::symlink(json, folder.join("tokenizer.json")).unwrap();
        write("tokenizer_config.json", config.to_string());
        write("config.json", json!({ "model_type": "golden" }).to_string());
        let spec = ModelSpec {
            name: "golden".to_owned(),
            dir: folder.clone(),
            template: template.map(Path::to_owned),
            ..ModelSpec::default()
        };
        let model = Model { folder, models: Models::new(vec![spec]).at_time(now) };
        let mut cause = None;
        model.models.load_all(|_, result| cause = result.err().map(ToString::to_string));
        cause.map_or(Ok(model), Err)
    }

    fn run(&self, endpoint: Endpoint, request: &str) -> Result<Tokens, Skip> {
        self.models.tokenize(endpoint, request.as_bytes(), &LIMITS, true, |_| ()).result
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.folder).ok();
    }
}

#[derive(Default)]
struct Tally {
    equal: usize,
    /// As the engine refuses them.
    refused: usize,
    skipped: BTreeMap<String, usize>,
    differ: Vec<String>,
}

enum Same {
    Equal,
    Refused,
}

impl Tally {
    fn count(&mut self, id: &str, outcome: Result<Same, String>) {
        match outcome {
            Ok(Same::Equal) => self.equal += 1,
            Ok(Same::Refused) => self.refused += 1,
            Err(how) => self.differ.push(format!("{id}: {how}")),
        }
    }

    fn skip(&mut self, skip: Skip) {
        *self.skipped.entry(skip.to_string()).or_default() += 1;
    }

    fn finish(self, what: &str) {
        let (equal, refused, differ) = (self.equal, self.refused, self.differ.len());
        println!("{what}: {equal} equal, {refused} refused as expected, {differ} differ");
        self.skipped.iter().for_each(|(skip, count)| println!("{what}: {count} {skip}"));
        self.differ.iter().for_each(|case| println!("  {case}"));
        assert!(self.differ.is_empty(), "{what}: {} cases differ", self.differ.len());
        let seen = self.equal + self.refused + self.skipped.len();
        assert!(seen > 0, "{what}: no case was compared");
    }
}

/// Where two texts part.
fn compare_texts(ours: &str, engine: &str) -> Result<(), String> {
    if ours == engine {
        return Ok(());
    }
    let same = ours.bytes().zip(engine.bytes()).take_while(|(a, b)| a == b).count();
    let from = ours.floor_char_boundary(same);
    let tail = |text: &str| text[from..].chars().take(60).collect::<String>();
    Err(format!("text differs at {from}: {:?} for {:?}", tail(ours), tail(engine)))
}

fn ids(value: &Value) -> Vec<u32> {
    let ids = value.as_array().into_iter().flatten();
    ids.map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
}

fn compare_ids(ours: &[u32], engine: &Value) -> Result<(), String> {
    if engine.is_null() || ours == ids(engine) {
        return Ok(());
    }
    let engine = ids(engine);
    let same = ours.iter().zip(&engine).take_while(|(a, b)| a == b).count();
    let tail = |ids: &[u32]| ids.iter().skip(same).take(8).copied().collect::<Vec<_>>();
    Err(format!("ids differ at {same}: {:?} for {:?}", tail(ours), tail(&engine)))
}

fn compare(case: &Case, ours: Result<(String, Option<Vec<u32>>), Skip>) -> Result<Same, String> {
    match (ours, case["expected_text"].as_str()) {
        (Ok((text, ids)), Some(engine)) => {
            compare_texts(&text, engine)?;
            ids.map_or(Ok(()), |ids| compare_ids(&ids, &case["expected_ids"])).map(|()| Same::Equal)
        }
        (Err(Skip::Refused), None) => Ok(Same::Refused),
        (Ok((text, _)), None) => {
            Err(format!("{:?} for a refusal: {}", tail(&text), case["expected_error"]["message"]))
        }
        (Err(skip), _) => Err(format!("{skip} for {:.300}", case["expected_text"].to_string())),
    }
}

fn tail(text: &str) -> String {
    text.chars().take(200).collect()
}

#[test]
fn templates() {
    let (Some(golden), Some(tokenizers)) = (folder("GOLDEN_DIR"), folder("TOKENIZERS_DIR")) else {
        return;
    };
    let only = std::env::var("GOLDEN_ONLY").unwrap_or_default();
    let manifest = parse(&read(&golden.join("manifest.json")));
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("t/models/tiny");
    let mut tally = Tally::default();
    for entry in manifest.as_array().unwrap() {
        let name = entry["name"].as_str().unwrap();
        if !name.contains(&only) {
            continue;
        }
        let tokenizer = entry["tokenizer"].as_str();
        let source = tokenizer.map_or(tiny.clone(), |name| tokenizer_folder(&tokenizers, name));
        let mut config = match tokenizer {
            Some(_) => parse(&read(&source.join("tokenizer_config.json"))),
            None => json!({}),
        };
        for token in ["bos", "eos", "unk", "sep", "pad", "cls", "mask"]
            .map(|name| name.to_owned() + "_token")
        {
            config[&token] = entry["special_tokens"][&token].clone();
        }
        let template = golden.join(entry["template_file"].as_str().unwrap());
        let cases = cases(&golden.join(entry["cases_file"].as_str().unwrap()));
        let model = Model::new(name, &source, &config, Some(&template), moment(&entry["now"]));
        let model = match model {
            Ok(model) => model,
            Err(cause) => {
                cases.iter().for_each(|case| tally.count(case.id(), Err(cause.clone())));
                continue;
            }
        };
        for case in cases {
            let ours = if case["endpoint"] == "render" {
                let input = case.request.as_bytes();
                let text = model.models.render_template(0, input, &LIMITS);
                text.map(|text| (text, None))
            } else {
                let tokens = model.run(Endpoint::Chat, &case.request);
                tokens
                    .map(|tokens| (tokens.text.unwrap_or_default(), tokenizer.map(|_| tokens.ids)))
            };
            tally.count(case.id(), compare(&case, ours));
        }
    }
    tally.finish("cases");
}

/// The tokenizers that have a file in a folder of cases, with those cases.
fn each_tokenizer(what: &str, mut run: impl FnMut(&Model, &Case, &mut Tally)) {
    let (Some(golden), Some(tokenizers)) = (folder("GOLDEN_DIR"), folder("TOKENIZERS_DIR")) else {
        return;
    };
    let mut tally = Tally::default();
    for file in files(&golden.join(what)) {
        let cases = cases(&file);
        let source = tokenizer_folder(&tokenizers, cases[0]["tokenizer"].as_str().unwrap());
        let config = parse(&read(&source.join("tokenizer_config.json")));
        let name = format!("{what}-{}", file.file_stem().unwrap().to_string_lossy());
        let model = Model::new(&name, &source, &config, None, NOW).unwrap();
        cases.iter().for_each(|case| run(&model, case, &mut tally));
    }
    tally.finish(what);
}

#[test]
fn encode() {
    each_tokenizer("encode", |model, case, tally| {
        let text = &case["text"];
        if text == "" {
            // No request has an empty prompt.
            return tally.skip(Skip::Refused);
        }
        let special = &case["add_special_tokens"];
        let request = json!({ "model": "golden", "prompt": text, "add_special_tokens": special });
        let outcome = match model.run(Endpoint::Completions, &request.to_string()) {
            Ok(tokens) => compare_ids(&tokens.ids, &case["expected_ids"]).map(|()| Same::Equal),
            Err(skip) => Err(skip.to_string()),
        };
        tally.count(case.id(), outcome);
    });
}

#[test]
fn completions() {
    each_tokenizer("completions", |model, case, tally| {
        let outcome = match (model.run(Endpoint::Completions, &case.request), &case["expected_ids"])
        {
            (Ok(tokens), Value::Array(prompts)) => {
                compare_ids(&tokens.ids, &prompts[0]).map(|()| Same::Equal)
            }
            (Err(Skip::Refused), Value::Null) => Ok(Same::Refused),
            (ours, _) => Err(format!("{ours:?} for {:.200}", case.fields)),
        };
        tally.count(case.id(), outcome);
    });
}

/// Numbers that JSON has no spelling for are written as objects in the cases.
fn spelled(value: &Value) -> Value {
    match value {
        Value::Object(map) if map.len() == 1 && map.contains_key("__f__") => map["__f__"].clone(),
        Value::Object(map) => {
            map.iter().map(|(key, value)| (key.clone(), spelled(value))).collect()
        }
        Value::Array(items) => items.iter().map(spelled).collect(),
        other => other.clone(),
    }
}

#[test]
fn preprocess() {
    let Some(golden) = folder("GOLDEN_DIR") else { return };
    let mut tally = Tally::default();
    for case in cases(&golden.join("preprocess.jsonl")) {
        let ours = prepare_chat(case.request.as_bytes(), case["content_format"] == "openai");
        let refused = !case["expected_error"].is_null();
        let outcome = match ours {
            Err(Skip::Refused) if refused => Ok(Same::Refused),
            Err(skip) => Err(skip.to_string()),
            Ok(text) if refused => Err(format!("{text} for a refusal")),
            Ok(text) => {
                let text = text.replace("NaN", "\"nan\"").replace("Infinity", "\"inf\"");
                let ours = parse(&text.replace("-\"inf\"", "\"-inf\""));
                let mut kwargs = spelled(&case["expected_chat_template_kwargs"]);
                if !case["expected_tools"].is_null() {
                    kwargs["tools"] = spelled(&case["expected_tools"]);
                }
                // As text, so that the order of keys counts; that of the arguments does not.
                let conversation = spelled(&case["expected_conversation"]).to_string();
                let special = &case["expected_add_special_tokens"];
                compare_texts(&ours["conversation"].to_string(), &conversation)
                    .and_then(|()| {
                        compare_texts(
                            &ours["kwargs"]["tools"].to_string(),
                            &kwargs["tools"].to_string(),
                        )
                    })
                    .and_then(|()| {
                        if ours["kwargs"] == kwargs {
                            Ok(())
                        } else {
                            Err(format!("{} for {kwargs}", ours["kwargs"]))
                        }
                    })
                    .and_then(|()| {
                        if ours["add_special_tokens"] == *special {
                            Ok(())
                        } else {
                            Err("add_special_tokens".to_owned())
                        }
                    })
                    .map(|()| Same::Equal)
            }
        };
        tally.count(case.id(), outcome);
    }
    tally.finish("preprocess");
}

/// Models that the engine renders by its own code: equal, or skipped by name; never another prompt.
#[test]
fn non_jinja() {
    let (Some(golden), Some(tokenizers)) = (folder("GOLDEN_DIR"), folder("TOKENIZERS_DIR")) else {
        return;
    };
    for file in files(&golden.join("non_jinja")) {
        let mut tally = Tally::default();
        let cases = cases(&file);
        let name = file.file_stem().unwrap().to_string_lossy().into_owned();
        let harmony = name.contains("harmony");
        let model_type = if harmony { "gpt_oss" } else { &name };
        let unnamed = if harmony { "gptoss" } else { "deepseek_v3" };
        let named = cases.iter().find_map(|case| case["tokenizer"].as_str());
        let source = tokenizer_folder(&tokenizers, named.unwrap_or(unnamed));
        let config = parse(&read(&source.join("tokenizer_config.json")));
        let now = cases.first().map_or(NOW, |case| moment(&case["now"]));
        let mut model = Model::new(&name, &source, &config, None, now).unwrap();
        let config = json!({ "model_type": model_type }).to_string();
        fs::write(model.folder.join("config.json"), config).unwrap();
        let dir = model.folder.clone();
        let spec = ModelSpec { name: "golden".to_owned(), dir, ..ModelSpec::default() };
        model.models = Models::new(vec![spec]).at_time(now);
        model.models.load_all(|_, result| assert!(result.is_ok()));
        for case in &cases {
            match model.run(Endpoint::Chat, &case.request) {
                Err(skip @ Skip::Unsupported) => tally.skip(skip),
                ours => {
                    let text =
                        ours.map(|tokens| (tokens.text.unwrap_or_default(), Some(tokens.ids)));
                    tally.count(case.id(), compare(case, text));
                }
            }
        }
        tally.finish(&name);
    }
}
