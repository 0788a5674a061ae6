//! Multi-turn chat sessions under shared system prompts, grown by the engine's own answers.

use std::collections::VecDeque;

use serde_json::{Value, json};

use crate::client::{Abort, Client, Request};
use crate::report::Record;
use crate::run::Schedule;
use crate::text::Random;

#[derive(Clone, Debug)]
pub struct Shape {
    pub model: String,
    pub seed: u64,
    pub sessions: usize,
    pub turns: usize,
    /// Words of each of the shared system prompts.
    pub systems: Vec<usize>,
    pub user_words: usize,
    pub max_tokens: usize,
    /// The part of the turns that asks for a stream.
    pub stream: f64,
    /// The part of the sessions that is text to complete, not chat.
    pub completions: f64,
}

pub struct Sessions {
    shape: Shape,
    ready: VecDeque<Session>,
    left: usize,
}

pub struct Session {
    number: usize,
    turn: usize,
    completion: bool,
    /// What was said; of a completion the text so far is the one entry.
    messages: Vec<Value>,
    text: String,
    random: Random,
    shape: Shape,
}

impl Sessions {
    pub fn new(shape: Shape) -> Sessions {
        let systems: Vec<String> = shape
            .systems
            .iter()
            .enumerate()
            .map(|(at, &words)| Random::new(shape.seed, 1_000_000 + at as u64).text(words))
            .collect();
        let ready = (0..shape.sessions)
            .map(|number| Session::new(&shape, number, &systems[number % systems.len()]))
            .collect();
        let left = shape.sessions * shape.turns;
        Sessions { shape, ready, left }
    }
}

impl Schedule for Sessions {
    type Item = Session;

    fn next(&mut self) -> Option<Session> {
        self.ready.pop_front()
    }

    fn left(&self) -> usize {
        self.left
    }

    fn done(&mut self, session: Session, _: &Record) {
        self.left -= 1;
        if session.turn < self.shape.turns {
            self.ready.push_back(session);
        }
    }
}

impl Session {
    fn new(shape: &Shape, number: usize, system: &str) -> Session {
        let mut random = Random::new(shape.seed, number as u64);
        Session {
            number,
            turn: 0,
            completion: random.unit() < shape.completions,
            messages: vec![json!({ "role": "system", "content": system })],
            text: system.to_owned(),
            random,
            shape: shape.clone(),
        }
    }
}

/// One turn.
pub fn act(client: &mut Client, session: &mut Session) -> Record {
    let shape = &session.shape;
    let stream = session.random.unit() < shape.stream;
    let words = 1 + shape.user_words / 2 + session.random.below(shape.user_words.max(1));
    let user = session.random.text(words);
    let mut body = json!({ "model": shape.model, "max_tokens": shape.max_tokens });
    if stream {
        body["stream"] = true.into();
        body["stream_options"] = json!({ "include_usage": true });
    }
    let path = if session.completion {
        session.text += &format!(" {user}");
        body["prompt"] = session.text.as_str().into();
        "/v1/completions"
    } else {
        session.messages.push(json!({ "role": "user", "content": user }));
        body["messages"] = session.messages.as_slice().into();
        "/v1/chat/completions"
    };
    let body = body.to_string();
    let request = Request { path, body: body.as_bytes(), chunked: false, abort: Abort::Never };
    let id = session.turn * shape.sessions + session.number;
    let kind = if session.completion { "completion" } else { "chat" };
    let record = Record::new(id, kind, 200, client.send(&request));
    session.turn += 1;
    session.text += &record.text;
    session.messages.push(json!({ "role": "assistant", "content": record.text }));
    record
}
