//! One capture: events and requests in the order in which they were seen.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::Path;

use serde_json::Value;

pub struct Capture {
    pub name: String,
    pub steps: Vec<Step>,
    /// Sockets that the events came from: data-parallel ranks have one each.
    pub ranks: usize,
}

pub enum Step {
    Event { rank: usize, topic: Vec<u8>, payload: Vec<u8> },
    Request(Request),
}

pub struct Request {
    pub id: String,
    pub path: String,
    pub body: String,
    /// The rank that it was sent to.
    pub rank: usize,
    /// Whether the engine served it.
    pub accepted: bool,
    /// The engine's own token ids.
    pub ids: Value,
    /// Tokens that the engine found cached, or why that says nothing.
    pub cached: Result<u64, &'static str>,
}

impl Capture {
    pub fn read(path: &Path) -> crate::Result<Capture> {
        let text = fs::read_to_string(path)?;
        let lines: Vec<Value> = text.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
        let of_kind = |kind: &'static str| lines.iter().filter(move |line| line["kind"] == kind);
        let responses: HashMap<&str, &Value> =
            of_kind("response").filter_map(|line| Some((line["id"].as_str()?, line))).collect();
        let sources: BTreeSet<&str> =
            of_kind("event").filter_map(|line| line["source"].as_str()).collect();
        let ranks = sources.len().max(1);
        let rank = |line: &Value| {
            let source = line["source"].as_str().unwrap_or_default();
            sources.iter().position(|known| *known == source).unwrap_or_default()
        };
        let mut steps = Vec::new();
        // The event that tells of a reset comes with the engine's next step.
        let mut reset = vec![false; ranks];
        for line in &lines {
            match line["kind"].as_str() {
                Some("event") => {
                    let rank = rank(line);
                    reset[rank] = false;
                    steps.push(event(line, rank)?);
                }
                Some("admin") => reset.fill(true),
                Some("request") => {
                    let mut request = request(line, &responses, ranks);
                    if reset.get(request.rank) != Some(&false) {
                        request.cached = Err("no event has told of the reset yet");
                    }
                    steps.push(Step::Request(request));
                }
                _ => {}
            }
        }
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Capture { name, steps, ranks })
    }
}

fn event(line: &Value, rank: usize) -> crate::Result<Step> {
    let frames = line["frames"].as_array().ok_or("an event without frames")?;
    let decoded: Vec<Vec<u8>> =
        frames.iter().map(|frame| base64(frame.as_str().unwrap_or_default())).collect();
    match <[Vec<u8>; 3]>::try_from(decoded) {
        Ok([topic, _, payload]) => Ok(Step::Event { rank, topic, payload }),
        Err(_) => Err("an event without three frames".into()),
    }
}

fn request(line: &Value, responses: &HashMap<&str, &Value>, ranks: usize) -> Request {
    let text = |name: &str| line[name].as_str().unwrap_or_default().to_owned();
    let id = text("id");
    let response = responses.get(id.as_str()).copied().unwrap_or(&Value::Null);
    let rendered = match &line["render"]["json"] {
        // Of a batch of prompts the first.
        Value::Array(all) => all.first().map_or(&Value::Null, |first| &first["token_ids"]),
        one => &one["token_ids"],
    };
    let given = &line["body"]["prompt"];
    let ids = if rendered.is_array() {
        rendered
    } else if line["tokenize"]["json"]["tokens"].is_array() {
        &line["tokenize"]["json"]["tokens"]
    } else {
        given
    };
    let pinned =
        line["headers"]["X-data-parallel-rank"].as_str().and_then(|rank| rank.parse().ok());
    let cached = match pinned {
        None if ranks > 1 => Err("the engine does not tell which rank served it"),
        _ => cached(&line["body"], response),
    };
    Request {
        rank: pinned.unwrap_or_default(),
        path: text("path"),
        body: line["body"].to_string(),
        accepted: response["status"] == 200,
        ids: ids.clone(),
        cached,
        id,
    }
}

fn cached(body: &Value, response: &Value) -> Result<u64, &'static str> {
    if body["echo"] == true && !body["logprobs"].is_null() {
        return Err("echo with logprobs does not read the cache");
    }
    if body["prompt"].as_array().is_some_and(|all| all.len() > 1 && !all[0].is_number()) {
        return Err("of several prompts the engine reports the last");
    }
    let usage = &response["json"]["usage"];
    // Each API says it its own way.
    let said = [
        &usage["prompt_tokens_details"]["cached_tokens"],
        &usage["input_tokens_details"]["cached_tokens"],
        &usage["cache_read_input_tokens"],
    ];
    match said.into_iter().find_map(Value::as_u64) {
        Some(cached) => Ok(cached),
        // Versions before 0.32 say null for none.
        None if usage.is_object() => Ok(0),
        None => Err("the engine reports no cached tokens"),
    }
}

fn base64(text: &str) -> Vec<u8> {
    const ALPHABET: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let (mut bytes, mut bits, mut word) = (Vec::new(), 0, 0u32);
    for letter in text.bytes().filter(|letter| *letter != b'=') {
        let value = ALPHABET.iter().position(|known| *known == letter).unwrap_or_default();
        word = word << 6 | value as u32;
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            bytes.push((word >> bits) as u8);
        }
    }
    bytes
}
