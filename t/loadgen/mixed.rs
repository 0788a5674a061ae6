//! A schedule of all that clients do, so that two runs can be compared request by request.
//!
//! What is sent as request n depends on the seed and n alone: not on answers, order or time.

use serde_json::{Value, json};

use crate::client::{Abort, Client, Request};
use crate::report::Record;
use crate::run::Schedule;
use crate::text::Random;

#[derive(Clone, Debug)]
pub struct Shape {
    pub model: String,
    pub seed: u64,
    pub requests: usize,
    /// The part of the clients that goes away early.
    pub abort: f64,
}

pub struct Mixed {
    shape: Shape,
    next: usize,
    left: usize,
}

pub struct Planned {
    id: usize,
    kind: &'static str,
    path: &'static str,
    body: Vec<u8>,
    chunked: bool,
    abort: Abort,
    /// The status that it deserves.
    expected: u16,
}

/// Requests of one session follow each other at this distance.
const SESSIONS: usize = 50;
const TURNS: usize = 6;

impl Mixed {
    pub fn new(shape: Shape) -> Mixed {
        let left = shape.requests;
        Mixed { shape, next: 0, left }
    }
}

impl Schedule for Mixed {
    type Item = Planned;

    fn next(&mut self) -> Option<Planned> {
        let id = self.next;
        self.next += 1;
        (id < self.shape.requests).then(|| plan(&self.shape, id))
    }

    fn left(&self) -> usize {
        self.left
    }

    fn done(&mut self, _: Planned, _: &Record) {
        self.left -= 1;
    }
}

pub fn act(client: &mut Client, planned: &mut Planned) -> Record {
    let request = Request {
        path: planned.path,
        body: &planned.body,
        chunked: planned.chunked,
        abort: planned.abort,
    };
    Record::new(planned.id, planned.kind, planned.expected, client.send(&request))
}

fn plan(shape: &Shape, id: usize) -> Planned {
    let mut random = Random::new(shape.seed, id as u64);
    let abort = match random.unit() < shape.abort {
        true if random.unit() < 0.5 => Abort::MidBody,
        true => Abort::MidAnswer,
        false => Abort::Never,
    };
    let chunked = random.unit() < 0.1;
    let stream = random.unit() < 0.6;
    let (kind, path, body, expected) = match random.below(100) {
        0..60 => ("chat", "/v1/chat/completions", chat(shape, id), 200),
        60..68 => ("tools", "/v1/chat/completions", tools(shape, id), 200),
        68..76 => ("completion", "/v1/completions", completion(&mut random), 200),
        76..80 => ("ids", "/v1/completions", ids(&mut random), 200),
        80..84 => ("long", "/v1/completions", json!({ "prompt": random.text(6000) }), 200),
        84..88 => ("salt", "/v1/chat/completions", salted(shape, id), 200),
        88..90 => ("embeddings", "/v1/embeddings", json!({ "input": random.text(20) }), 200),
        90..93 => ("bare", "/v1/chat/completions", json!({ "messages": [] }), 400),
        93..96 => {
            ("stranger", "/v1/completions", json!({ "model": "stranger", "prompt": "x" }), 404)
        }
        _ => ("garbage", "/v1/chat/completions", Value::Null, 400),
    };
    let body = if kind == "garbage" {
        format!("{{\"model\": {}", random.text(30)).into_bytes()
    } else {
        finish(shape, body, stream).to_string().into_bytes()
    };
    Planned { id, kind, path, body, chunked, abort, expected }
}

fn finish(shape: &Shape, mut body: Value, stream: bool) -> Value {
    if body.get("model").is_none() && body.get("messages") != Some(&json!([])) {
        body["model"] = shape.model.as_str().into();
    }
    body["max_tokens"] = 12.into();
    if stream {
        body["stream"] = true.into();
        body["stream_options"] = json!({ "include_usage": true });
    }
    body
}

/// A turn of one of the sessions: all that was said in it before is said again.
fn messages(shape: &Shape, id: usize) -> Vec<Value> {
    let turn = id / SESSIONS % TURNS;
    let session = id % SESSIONS + id / (SESSIONS * TURNS) * SESSIONS;
    let system = Random::new(shape.seed ^ 1, session as u64 % 8).text(60 + session % 8 * 80);
    let mut random = Random::new(shape.seed ^ 2, session as u64);
    let mut messages = vec![json!({ "role": "system", "content": system })];
    for at in 0..=turn {
        let words = 10 + random.below(50);
        messages.push(json!({ "role": "user", "content": random.text(words) }));
        if at < turn {
            messages.push(json!({ "role": "assistant", "content": random.text(15) }));
        }
    }
    messages
}

fn chat(shape: &Shape, id: usize) -> Value {
    json!({ "messages": messages(shape, id) })
}

fn salted(shape: &Shape, id: usize) -> Value {
    json!({ "messages": messages(shape, id), "cache_salt": format!("tenant-{}", id % 3) })
}

fn tools(shape: &Shape, id: usize) -> Value {
    let parameters = json!({ "type": "object", "properties": { "city": { "type": "string" } } });
    let function =
        json!({ "name": "weather", "description": "Tells the weather", "parameters": parameters });
    let tool = json!({ "type": "function", "function": function });
    json!({ "messages": messages(shape, id), "tools": [tool] })
}

fn completion(random: &mut Random) -> Value {
    let words = 20 + random.below(300);
    json!({ "prompt": random.text(words) })
}

fn ids(random: &mut Random) -> Value {
    let length = 1 + random.below(200);
    json!({ "prompt": (0..length).map(|_| random.below(400)).collect::<Vec<_>>() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_depends_on_the_seed_and_its_number_alone() {
        let shape = |seed| Shape { model: "m".to_owned(), seed, requests: 120, abort: 0.1 };
        let all = |seed| (0..120).map(|id| plan(&shape(seed), id).body).collect::<Vec<_>>();
        let mut backwards: Vec<_> = (0..120).rev().map(|id| plan(&shape(1), id).body).collect();
        backwards.reverse();
        assert_eq!(all(1), backwards);
        assert_ne!(all(1), all(2));
    }

    #[test]
    fn a_session_repeats_what_was_said_before() {
        let shape = Shape { model: "m".to_owned(), seed: 3, requests: 0, abort: 0.0 };
        let (first, second) = (messages(&shape, 7), messages(&shape, 7 + SESSIONS));
        assert_eq!(second[..first.len()], first[..]);
        assert_eq!(second.len(), first.len() + 2);
        assert_ne!(messages(&shape, 7 + SESSIONS * TURNS)[1], first[1]);
    }
}
