//! The paths that a client or a gateway asks for.

use std::io;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use crossbeam_channel::{Receiver, RecvTimeoutError};
use ngx_http_kvc_aware_module::prompt::{Endpoint, Tokens};
use ngx_http_kvc_aware_module::types::Skip;
use serde_json::{Map, Value, json};

use crate::answer::Answer;
use crate::control::Control;
use crate::engine::{Engine, Job, Output};
use crate::http::{Connection, Request};
use crate::options::Options;
use crate::publisher::Publisher;
use crate::render;
use crate::tokenizer::Tokenizer;

const JSON: &str = "application/json";

/// How often a waiting answer looks whether its client is still there.
const LOOK: Duration = Duration::from_millis(50);

/// Tokens of an answer where the request sets no limit.
const DEFAULT_MAX_TOKENS: u64 = 16;

pub struct Server {
    pub options: Options,
    /// Of data-parallel rank 0, the one that faults are asked of.
    pub engine: Arc<Engine>,
    pub publisher: Arc<Publisher>,
    /// Of all ranks.
    pub engines: Vec<Arc<Engine>>,
    pub control: Control,
    tokenizer: Tokenizer,
    address: String,
    answers: AtomicU64,
}

/// One generation request, understood.
struct Generation {
    chat: bool,
    stream: bool,
    usage: bool,
    id: String,
    prompt_tokens: usize,
    answer: Arc<Answer>,
    output: Receiver<Output>,
    cancelled: Arc<AtomicBool>,
}

impl Server {
    pub fn new(options: Options, address: String) -> Result<Server, String> {
        let tokenizer = Tokenizer::load(&options)?;
        // Two engines name equal blocks differently, as real ones do.
        let seed = address
            .bytes()
            .fold(0u64, |seed, byte| seed.wrapping_mul(31).wrapping_add(u64::from(byte)));
        let (mut engines, mut publishers) = (Vec::new(), Vec::new());
        for rank in 0..options.ranks {
            let own = options.of_rank(rank);
            let publisher = Publisher::start(&own)?;
            let seed = seed.wrapping_add(u64::from(rank)) << 32;
            engines.push(Arc::new(Engine::new(&own, publisher.clone(), seed)));
            publishers.push(publisher);
        }
        let control = Control::new(options.keepalive);
        Ok(Server {
            options,
            engine: engines[0].clone(),
            publisher: publishers[0].clone(),
            engines,
            control,
            tokenizer,
            address,
            answers: AtomicU64::new(0),
        })
    }

    /// Serves one connection until either side is done with it.
    pub fn connection(&self, stream: TcpStream) {
        let Ok(mut connection) = Connection::new(stream) else { return };
        while let Ok(Some(request)) = connection.next(self.control.keepalive()) {
            connection.headers = vec![("X-Mock-Engine", self.address.clone())];
            if self.request(&mut connection, &request).is_err() {
                return;
            }
        }
    }

    fn request(&self, connection: &mut Connection, request: &Request) -> io::Result<()> {
        if let Some(path) = request.path.strip_prefix("/mock/") {
            return self.control.request(self, connection, request, path);
        }
        if request.method == "GET" {
            return self.get(connection, &request.path);
        }
        connection.headers.push(("X-Mock-Body", self.control.received(request)));
        if !self.knows(request) {
            return error(connection, 401, "Unauthorized");
        }
        if self.control.resets_now() {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        if let Some(status) = self.control.fails_now() {
            return error(connection, status, "a fault was asked for");
        }
        match request.path.as_str() {
            "/tokenize" => render::tokenize(self, connection, request),
            "/reset_prefix_cache" => {
                let cleared: Vec<bool> = self.engines.iter().map(|engine| engine.clear()).collect();
                let success = !cleared.contains(&false);
                respond(connection, 200, &json!({ "success": success }))
            }
            path => match (render::endpoint(path), Endpoint::from_path(path)) {
                (Some(endpoint), _) => render::render(self, connection, request, endpoint),
                (_, Some(endpoint)) => self.generate(connection, request, endpoint),
                _ => respond(connection, 200, &json!({ "object": "mock", "path": path })),
            },
        }
    }

    /// Whether a request that needs a key has it.
    fn knows(&self, request: &Request) -> bool {
        let Some(key) = &self.options.api_key else { return true };
        let bearer =
            request.header("authorization").and_then(|value| value.strip_prefix("Bearer "));
        !request.path.starts_with("/v1") || bearer == Some(key)
    }

    fn get(&self, connection: &mut Connection, path: &str) -> io::Result<()> {
        match path {
            "/health" => connection.respond(200, "text/plain", b""),
            "/metrics" => {
                let text = self.metrics();
                connection.respond(200, "text/plain; version=0.0.4", text.as_bytes())
            }
            "/v1/models" => {
                let names = std::iter::once(&self.options.model).chain(&self.options.loras);
                let data: Vec<_> =
                    names.map(|name| json!({ "id": name, "object": "model" })).collect();
                respond(connection, 200, &json!({ "object": "list", "data": data }))
            }
            _ => error(connection, 404, "no such path"),
        }
    }

    /// The ids of a request.
    pub fn tokens(
        &self,
        endpoint: Endpoint,
        request: &Request,
        body: &Map<String, Value>,
    ) -> Result<Tokens, Skip> {
        self.tokenizer.request(endpoint, &request.body, body)
    }

    fn generate(
        &self,
        connection: &mut Connection,
        request: &Request,
        endpoint: Endpoint,
    ) -> io::Result<()> {
        let Ok(body) = serde_json::from_slice::<Map<String, Value>>(&request.body) else {
            return refuse(connection, Skip::BadJson);
        };
        let tokens = match self.tokenizer.request(endpoint, &request.body, &body) {
            Ok(tokens) => tokens,
            Err(skip) => return refuse(connection, skip),
        };
        let limit = ["max_completion_tokens", "max_tokens"]
            .iter()
            .find_map(|name| body.get(*name).and_then(Value::as_u64))
            .unwrap_or(DEFAULT_MAX_TOKENS);
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        if tokens.ids.is_empty() || limit == 0 || tokens.ids.len() + limit > self.max_tokens() {
            return error(connection, 400, "an empty prompt, or one that does not fit");
        }
        let Some(engine) = self.engine_for(request) else {
            return error(connection, 400, "the data-parallel rank is out of range");
        };
        let generation = self.submit(engine, tokens, &body, endpoint, limit);
        let done = if generation.stream {
            stream(connection, &generation, &self.options.model)
        } else {
            whole(connection, &generation, &self.options.model)
        };
        generation.cancelled.store(true, Ordering::Relaxed);
        done
    }

    /// The rank that the request names, or each in turn.
    fn engine_for(&self, request: &Request) -> Option<&Engine> {
        let rank = match request.header("x-data-parallel-rank") {
            Some(rank) => rank.parse().ok()?,
            None => self.answers.load(Ordering::Relaxed) as usize % self.engines.len(),
        };
        self.engines.get(rank).map(Arc::as_ref)
    }

    fn submit(
        &self,
        engine: &Engine,
        tokens: Tokens,
        body: &Map<String, Value>,
        endpoint: Endpoint,
        limit: usize,
    ) -> Generation {
        let chat = endpoint == Endpoint::Chat;
        let answer = Arc::new(Answer::new(&self.tokenizer, &tokens.ids, limit, !chat));
        let (sender, output) = crossbeam_channel::unbounded();
        let cancelled = Arc::new(AtomicBool::new(false));
        let options = body.get("stream_options");
        let number = self.answers.fetch_add(1, Ordering::Relaxed);
        let generation = Generation {
            chat,
            stream: body.get("stream").and_then(Value::as_bool).unwrap_or(false),
            usage: options.is_some_and(|options| options["include_usage"] == true),
            id: format!("{}-{number:016x}", if chat { "chatcmpl" } else { "cmpl" }),
            prompt_tokens: tokens.ids.len(),
            answer: answer.clone(),
            output,
            cancelled: cancelled.clone(),
        };
        engine.submit(Job {
            prompt: tokens.ids,
            answer,
            lora: tokens.lora,
            salt: tokens.salt,
            output: sender,
            cancelled,
        });
        generation
    }

    /// What a prompt and its answer may have together.
    pub fn max_tokens(&self) -> usize {
        self.options.max_model_len.min((self.options.blocks - 1) * self.options.block_size)
    }

    fn metrics(&self) -> String {
        let stats = self.engine.stats();
        let label = format!("engine=\"0\",model_name=\"{}\"", self.options.model);
        let usage = stats.blocks_used as f64 / stats.blocks.max(1) as f64;
        let mut text = String::new();
        let values = [
            ("gauge", "num_requests_running", stats.running as f64),
            ("gauge", "num_requests_waiting", stats.waiting as f64),
            ("gauge", "kv_cache_usage_perc", usage),
            ("counter", "prefix_cache_queries_total", stats.queries as f64),
            ("counter", "prefix_cache_hits_total", stats.hits as f64),
            ("counter", "num_preemptions_total", stats.preemptions as f64),
        ];
        for (kind, name, value) in values {
            text += &format!("# TYPE vllm:{name} {kind}\nvllm:{name}{{{label}}} {value:?}\n");
        }
        text + &format!(
            "# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{{block_size=\"{}\",\
             enable_prefix_caching=\"True\",engine=\"0\",num_gpu_blocks=\"{}\"}} 1.0\n",
            self.options.block_size, self.options.blocks
        )
    }
}

/// Hands the tokens over as they come; the head goes out before the first of them.
fn stream(connection: &mut Connection, generation: &Generation, model: &str) -> io::Result<()> {
    connection.start(200, "text/event-stream; charset=utf-8")?;
    let last = generation.answer.ids.len() - 1;
    let mut cached = 0;
    loop {
        match next(connection, generation)? {
            Output::Admitted { cached: tokens } => cached = tokens,
            Output::Token { at } => {
                if at == 0 && generation.chat {
                    let delta = json!({ "role": "assistant", "content": "" });
                    event(connection, &chunk(generation, model, Some(delta), false))?;
                }
                let piece = generation.answer.piece(at);
                let delta =
                    if generation.chat { json!({ "content": piece }) } else { json!(piece) };
                event(connection, &chunk(generation, model, Some(delta), at == last))?;
                if at == last {
                    break;
                }
            }
        }
    }
    if generation.usage {
        let mut last = chunk(generation, model, None, false);
        last["usage"] = usage(generation, cached);
        event(connection, &last)?;
    }
    connection.part("data: [DONE]\n\n")?;
    connection.finish()
}

fn whole(connection: &mut Connection, generation: &Generation, model: &str) -> io::Result<()> {
    let last = generation.answer.ids.len() - 1;
    let mut cached = 0;
    loop {
        match next(connection, generation)? {
            Output::Admitted { cached: tokens } => cached = tokens,
            Output::Token { at } if at == last => break,
            Output::Token { .. } => {}
        }
    }
    let text = &generation.answer.text;
    let (object, choice) = if generation.chat {
        let message = json!({ "role": "assistant", "content": text });
        ("chat.completion", json!({ "index": 0, "message": message, "finish_reason": "stop" }))
    } else {
        ("text_completion", json!({ "index": 0, "text": text, "finish_reason": "stop" }))
    };
    let answer = json!({
        "id": generation.id,
        "object": object,
        "created": now(),
        "model": model,
        "choices": [choice],
        "usage": usage(generation, cached),
    });
    respond(connection, 200, &answer)
}

/// Waits for the engine; an error where it died or the client left.
fn next(connection: &Connection, generation: &Generation) -> io::Result<Output> {
    loop {
        match generation.output.recv_timeout(LOOK) {
            Ok(output) => return Ok(output),
            Err(RecvTimeoutError::Timeout) if !connection.gone() => {}
            Err(_) => return Err(io::ErrorKind::ConnectionAborted.into()),
        }
    }
}

/// One event of a stream; the one without a choice carries the usage.
fn chunk(generation: &Generation, model: &str, delta: Option<Value>, last: bool) -> Value {
    let reason = if last { json!("stop") } else { Value::Null };
    let (object, part) = if generation.chat {
        ("chat.completion.chunk", "delta")
    } else {
        ("text_completion", "text")
    };
    let choices: Vec<_> = delta
        .map(|delta| json!({ "index": 0, part: delta, "finish_reason": reason }))
        .into_iter()
        .collect();
    json!({
        "id": generation.id,
        "object": object,
        "created": now(),
        "model": model,
        "choices": choices,
    })
}

fn usage(generation: &Generation, cached: usize) -> Value {
    let completion = generation.answer.ids.len();
    json!({
        "prompt_tokens": generation.prompt_tokens,
        "total_tokens": generation.prompt_tokens + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": { "cached_tokens": cached },
    })
}

fn event(connection: &mut Connection, value: &Value) -> io::Result<()> {
    connection.part(&format!("data: {value}\n\n"))
}

pub fn respond(connection: &mut Connection, status: u16, body: &Value) -> io::Result<()> {
    connection.respond(status, JSON, body.to_string().as_bytes())
}

pub fn error(connection: &mut Connection, status: u16, message: &str) -> io::Result<()> {
    let error = json!({ "message": message, "type": "mock", "code": status });
    respond(connection, status, &json!({ "error": error }))
}

pub fn refuse(connection: &mut Connection, skip: Skip) -> io::Result<()> {
    let status = if skip == Skip::UnknownModel { 404 } else { 400 };
    error(connection, status, &skip.to_string())
}

fn now() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs()
}
