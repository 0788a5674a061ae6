//! Equal requests through several ways in turn, so that the difference is the way's alone.

use std::io;

use serde_json::{Value, json};

use crate::client::{Abort, Client, Request};
use crate::report::{Record, quantile};
use crate::text::Random;

/// Words of the request that tells how many tokens a word has.
const PROBE_WORDS: usize = 2000;

/// Pairs that are sent first and not counted: connections, caches, allocators.
const WARM_UP: usize = 5;

pub struct Shape {
    pub model: String,
    pub seed: u64,
    /// Name and URL; the others are compared with the first.
    pub arms: Vec<(String, String)>,
    pub prompt_tokens: Vec<usize>,
    pub requests: usize,
}

struct Arm {
    name: String,
    client: Client,
    times: Vec<f64>,
}

/// One entry for each prompt length; times in seconds.
pub fn measure(shape: &Shape) -> io::Result<Vec<Value>> {
    let mut arms: Vec<Arm> = shape
        .arms
        .iter()
        .map(|(name, url)| Arm { name: name.clone(), client: Client::new(url), times: Vec::new() })
        .collect();
    let Some(first) = arms.first_mut() else { return Err(io::Error::other("no --arm given")) };
    let probe = send(&mut first.client, shape, &Random::new(shape.seed, 0).text(PROBE_WORDS))?;
    let per_word = probe.prompt as f64 / PROBE_WORDS as f64;
    let mut results = Vec::new();
    for &tokens in &shape.prompt_tokens {
        let words = (tokens as f64 / per_word) as usize;
        let mut prompt_tokens = 0;
        arms.iter_mut().for_each(|arm| arm.times.clear());
        for at in 0..WARM_UP + shape.requests {
            let order = at % arms.len();
            for turn in 0..arms.len() {
                let index = (order + turn) % arms.len();
                // A text that was sent before would be in the cache of an engine, and one way finds
                // that engine more often than another.
                let stream = (at * arms.len() + index) as u64;
                let text = Random::new(shape.seed ^ tokens as u64, stream).text(words);
                let arm = &mut arms[index];
                let record = send(&mut arm.client, shape, &text)?;
                prompt_tokens = record.prompt;
                if at >= WARM_UP {
                    arm.times.push(record.ttft.unwrap_or(record.total));
                }
            }
        }
        results.push(result(prompt_tokens, &arms));
    }
    Ok(results)
}

fn send(client: &mut Client, shape: &Shape, text: &str) -> io::Result<Record> {
    let body = json!({
        "model": shape.model,
        "messages": [{ "role": "user", "content": text }],
        "max_tokens": 1,
        "stream": true,
        "stream_options": { "include_usage": true },
    });
    let body = body.to_string();
    let path = "/v1/chat/completions";
    let request = Request { path, body: body.as_bytes(), chunked: false, abort: Abort::Never };
    let record = Record::new(0, "latency", 200, client.send(&request));
    match record.error {
        Some(error) => Err(io::Error::other(error)),
        None => Ok(record),
    }
}

fn result(prompt_tokens: u64, arms: &[Arm]) -> Value {
    let base = &arms[0];
    let arms: Vec<_> = arms
        .iter()
        .map(|arm| {
            // A pair shares its length and its moment: their differences hold less noise.
            let added: Vec<_> = arm.times.iter().zip(&base.times).map(|(a, b)| a - b).collect();
            let (times, base, added) = (sorted(&arm.times), sorted(&base.times), sorted(&added));
            let at = |part| (quantile(&times, part), quantile(&base, part));
            let ((p50, base50), (p99, base99)) = (at(0.5), at(0.99));
            json!({
                "name": arm.name,
                "p50": p50,
                "p99": p99,
                "p50_added": p50 - base50,
                "p99_added": p99 - base99,
                "p50_ratio": p50 / base50,
                "p99_ratio": p99 / base99,
                "pair_added": quantile(&added, 0.5),
            })
        })
        .collect();
    json!({ "prompt_tokens": prompt_tokens, "arms": arms })
}

fn sorted(times: &[f64]) -> Vec<f64> {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    times
}

pub fn table(results: &[Value]) -> String {
    let mut text = format!(
        "{:>8}  {:12}{:>10}{:>10}{:>12}{:>12}{:>12}{:>11}{:>11}",
        "tokens",
        "",
        "p50 ms",
        "p99 ms",
        "p50 added",
        "p99 added",
        "pair added",
        "p50 ratio",
        "p99 ratio"
    );
    for result in results {
        for arm in result["arms"].as_array().into_iter().flatten() {
            let value = |name: &str| arm[name].as_f64().unwrap_or(0.0);
            text += &format!(
                "\n{:>8}  {:12}{:>10.3}{:>10.3}{:>12.3}{:>12.3}{:>12.3}{:>11.2}{:>11.2}",
                result["prompt_tokens"].as_u64().unwrap_or(0),
                arm["name"].as_str().unwrap_or_default(),
                value("p50") * 1e3,
                value("p99") * 1e3,
                value("p50_added") * 1e3,
                value("p99_added") * 1e3,
                value("pair_added") * 1e3,
                value("p50_ratio"),
                value("p99_ratio"),
            );
        }
    }
    text
}
