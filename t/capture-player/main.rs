//! Plays captured events of a real engine to nginx and asks it, before each captured request, what
//! it would do: the token ids must be the engine's, and the matched tokens what the engine found
//! cached.
//!
//!     capture-player config DIR PORT     the http block's zone and upstreams
//!     capture-player play DIR PORT http://HOST:PORT/PATH     one line of JSON for each capture
//!
//! A data-parallel rank is a server of its own. PORT and the two after it are the first one's; each
//! further one has the next three.

mod capture;
mod publisher;

use std::error::Error;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use capture::{Capture, Request, Step};
use publisher::Publisher;
use serde_json::{Value, json};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// nginx must have loaded a tokenizer or applied a batch within this time.
const PATIENCE: Duration = Duration::from_secs(180);

fn main() -> Result<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["config", dir, port] => config(&captures(dir)?, port.parse()?),
        ["play", dir, port, index] => {
            let captures = captures(dir)?;
            for (n, ports) in ports(&captures, port.parse()?).enumerate() {
                println!("{}", play(&captures[n], n, &ports, index)?);
            }
        }
        _ => return Err("usage: capture-player config DIR PORT | play DIR PORT INDEX-URL".into()),
    }
    Ok(())
}

fn captures(dir: &str) -> Result<Vec<Capture>> {
    let mut paths: Vec<_> =
        fs::read_dir(dir)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "jsonl"));
    paths.sort();
    paths.iter().map(|path: &PathBuf| Capture::read(path)).collect()
}

/// The ports of each rank of each capture: of the engine, its events and its replays.
fn ports(captures: &[Capture], first: u16) -> impl Iterator<Item = Vec<[u16; 3]>> {
    let mut free = (first..).step_by(3);
    captures.iter().map(move |capture| {
        free.by_ref().take(capture.ranks).map(|port| [port, port + 1, port + 2]).collect()
    })
}

fn config(captures: &[Capture], port: u16) {
    println!("kvc_aware_zone kvc:64m;");
    for (n, ports) in ports(captures, port).enumerate() {
        println!("upstream capture{n} {{ kvc_aware kvc;");
        for [engine, events, replay] in ports {
            println!(
                "server 127.0.0.1:{engine}; kvc_aware_server 127.0.0.1:{engine} \
                 events=tcp://127.0.0.1:{events} replay=tcp://127.0.0.1:{replay};"
            );
        }
        println!("}}");
    }
}

/// What became of one capture's requests.
#[derive(Default)]
struct Tally {
    requests: u32,
    refused: u32,
    ids_equal: u32,
    /// Equal up to the first image.
    begun: u32,
    exact: u32,
    under: u32,
    over: u32,
    uncounted: Vec<String>,
    skipped: Vec<String>,
    wrong: Vec<String>,
}

fn play(capture: &Capture, n: usize, ports: &[[u16; 3]], index: &str) -> Result<Value> {
    let publishers: Vec<Publisher> = ports
        .iter()
        .map(|[_, events, replay]| Publisher::start(*events, *replay))
        .collect::<Result<_>>()?;
    let page = Page { index, upstream: format!("capture{n}") };
    for rank in 0..ports.len() {
        page.wait(rank, |server| server["connected"] == true)?;
    }
    let mut tally = Tally::default();
    for step in &capture.steps {
        match step {
            Step::Event { rank, topic, payload } => {
                let sequence = publishers[*rank].publish(topic, payload)?;
                page.wait(*rank, |server| server["last_seq"] == sequence)?;
            }
            Step::Request(request) => ask(&page, request, &mut tally)?,
        }
    }
    Ok(json!({
        "capture": capture.name,
        "requests": tally.requests,
        "refused": tally.refused,
        "ids_equal": tally.ids_equal,
        "begun": tally.begun,
        "exact": tally.exact,
        "under": tally.under,
        "over": tally.over,
        "uncounted": tally.uncounted,
        "skipped": tally.skipped,
        "wrong": tally.wrong,
    }))
}

fn ask(page: &Page<'_>, request: &Request, tally: &mut Tally) -> Result<()> {
    tally.requests += 1;
    if !request.accepted {
        tally.refused += 1;
        return Ok(());
    }
    let answer = page.explain(&request.path, &request.body)?;
    let status = answer["status"].as_str().unwrap_or("no status");
    if status.starts_with("skip:") {
        tally.skipped.push(format!("{} {status}", request.id));
        return Ok(());
    }
    let server = &answer["servers"][request.rank];
    let number = |name: &str| server[name].as_u64().ok_or(format!("no {name}"));
    let matched = number("matched_tokens")?;
    // Of a prompt with images only what is before the first is known here.
    let begun = answer["reason"] == "multimodal";
    let known = if begun { number("prompt_blocks")? * number("block_size")? } else { u64::MAX };
    if answer["tokens"] == request.ids {
        tally.ids_equal += 1;
    } else if begun && begins_with(&request.ids, &answer["tokens"]) {
        tally.begun += 1;
    } else {
        tally.wrong.push(format!("{} token ids", request.id));
    }
    match request.cached.map(|cached| cached.min(known)) {
        Err(cause) => tally.uncounted.push(format!("{}: {cause}", request.id)),
        Ok(cached) if cached == matched => tally.exact += 1,
        Ok(cached) => {
            let side = if matched < cached { &mut tally.under } else { &mut tally.over };
            *side += 1;
            tally.wrong.push(format!("{} matched {matched} cached {cached}", request.id));
        }
    }
    Ok(())
}

fn begins_with(ids: &Value, start: &Value) -> bool {
    let (Some(ids), Some(start)) = (ids.as_array(), start.as_array()) else { return false };
    !start.is_empty() && ids.starts_with(start)
}

/// nginx's index page, as far as one upstream goes.
struct Page<'a> {
    index: &'a str,
    upstream: String,
}

impl Page<'_> {
    fn wait(&self, rank: usize, reached: impl Fn(&Value) -> bool) -> Result<()> {
        let start = Instant::now();
        loop {
            let page = self.call("GET", &format!("?limit=0&upstream={}", self.upstream), "")?;
            let server = &page["servers"][rank];
            if reached(server) {
                return Ok(());
            }
            if start.elapsed() > PATIENCE {
                return Err(format!("{}: stuck at {server}", self.upstream).into());
            }
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits too until the tokenizers are loaded.
    fn explain(&self, path: &str, body: &str) -> Result<Value> {
        let query = format!("?path={path}&tokens=all&upstream={}", self.upstream);
        let start = Instant::now();
        loop {
            let answer = self.call("POST", &query, body)?;
            if answer["status"] != "skip:starting" || start.elapsed() > PATIENCE {
                return Ok(answer);
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    fn call(&self, method: &str, query: &str, body: &str) -> Result<Value> {
        let url = self.index.strip_prefix("http://").ok_or("no http:// URL")?;
        let (host, path) = url.split_once('/').ok_or("no path in the URL")?;
        let mut stream = TcpStream::connect(host)?;
        write!(
            stream,
            "{method} /{path}{query} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        )?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let (_, json) = answer.split_once("\r\n\r\n").ok_or("no answer")?;
        Ok(serde_json::from_str(json).map_err(|error| format!("{error} in {answer}"))?)
    }
}
