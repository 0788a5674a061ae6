//! Loads an OpenAI-compatible address and tells what came of it.
//!
//! | module | what it holds |
//! | --- | --- |
//! | `chat` | sessions of several turns under shared system prompts |
//! | `mixed` | a seeded schedule of all that clients do, going away included |
//! | `latency` | equal requests through several ways in turn |
//! | `run` | workers, pace, progress |
//! | `blame` | which failures the faults of a run explain |
//! | `client` | one connection |
//! | `report` | records → JSON and tables |
//! | `text` | seeded randomness and words |
#![forbid(unsafe_code)]

mod blame;
mod chat;
mod client;
mod latency;
mod mixed;
mod report;
mod run;
mod text;

use std::collections::HashMap;
use std::error::Error;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;

use serde_json::Value;

const USAGE: &str = "usage: loadgen chat|mixed|latency [option value]...
       loadgen compare|newly-failed|blame FILE...

chat: sessions of several turns
  --url URL            http://127.0.0.1:8080
  --label TEXT         name of the run                      run
  --model NAME         tiny
  --seed N             1
  --sessions N         24
  --turns N            6
  --systems N,N,…      words of each shared system prompt   200,400,800
  --user-words N       mean words of a turn                 40
  --max-tokens N       24
  --stream PART        of the turns that stream             1
  --completions PART   of the sessions that are no chat     0
  --concurrency N      16
  --rate N             requests/s, Poisson                  as fast as they are answered
  --until FILE         ends early, once there is such a file
  --progress 0|1       1
  --json FILE          writes the summary
  --records FILE       writes what became of each request, one JSON object a line
mixed: all that clients do; also
  --requests N         1000
  --abort PART         of the clients that go away early    0.05
latency: equal requests through several ways in turn
  --arm NAME=URL       repeated; the first is what the others are compared with
  --prompt-tokens N,N  6000
  --requests N         200
compare: summaries side by side
newly-failed: what failed in the second run alone, one `id kind at error` a line
blame: a list of faults, then files of --records: how many requests failed, and why; prints those
  that no fault explains";

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let command = args.next().unwrap_or_default();
    let rest: Vec<String> = args.collect();
    let result = match command.as_str() {
        "chat" => Options::parse(&rest).and_then(|options| chat_load(&options)),
        "mixed" => Options::parse(&rest).and_then(|options| mixed_load(&options)),
        "latency" => Options::parse(&rest).and_then(|options| latencies(&options)),
        "compare" => summaries(&rest).map(|runs| {
            println!("{}", report::table(&runs));
            true
        }),
        "newly-failed" => newly_failed(&rest),
        "blame" => blame_faults(&rest),
        "--help" | "-h" => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("loadgen: {error}");
            ExitCode::from(2)
        }
    }
}

type Result<T> = std::result::Result<T, Box<dyn Error>>;

struct Options {
    values: HashMap<String, String>,
    arms: Vec<(String, String)>,
}

impl Options {
    fn parse(args: &[String]) -> Result<Options> {
        let mut options = Options { values: HashMap::new(), arms: Vec::new() };
        for pair in args.chunks(2) {
            let [name, value] = pair else {
                return Err(format!("{} has no value", pair[0]).into());
            };
            // The usage text is the list of what there is.
            if !name.starts_with("--") || !USAGE.contains(&format!("  {name} ")) {
                return Err(format!("unknown option {name}").into());
            }
            if name == "--arm" {
                let (name, url) = value.split_once('=').ok_or("--arm wants NAME=URL")?;
                options.arms.push((name.to_owned(), url.to_owned()));
            } else {
                options.values.insert(name.clone(), value.clone());
            }
        }
        Ok(options)
    }

    fn text(&self, name: &str, default: &str) -> String {
        self.values.get(name).map_or(default, String::as_str).to_owned()
    }

    fn number<T: FromStr>(&self, name: &str, default: T) -> Result<T> {
        match self.values.get(name) {
            Some(value) => {
                value.parse().map_err(|_| format!("{name}: \"{value}\" is no number").into())
            }
            None => Ok(default),
        }
    }

    fn numbers(&self, name: &str, default: &str) -> Result<Vec<usize>> {
        let numbers = self.text(name, default);
        let numbers: std::result::Result<_, _> = numbers.split(',').map(str::parse).collect();
        numbers.map_err(|_| format!("{name} wants numbers with commas between them").into())
    }

    fn pace(&self) -> Result<run::Pace> {
        let rate = self.number("--rate", 0.0)?;
        let progress = self.number("--progress", 1u8)? > 0;
        Ok(run::Pace {
            url: self.text("--url", "http://127.0.0.1:8080"),
            concurrency: self.number("--concurrency", 16)?,
            rate: (rate > 0.0).then_some(rate),
            seed: self.number("--seed", 1)?,
            until: self.values.get("--until").map(PathBuf::from),
            progress: progress.then(|| self.text("--label", "run")),
        })
    }

    /// Prints the summary of a run; true where no request failed.
    fn report(&self, records: &[report::Record], elapsed: std::time::Duration) -> Result<bool> {
        let summary = report::summary(&self.text("--label", "run"), records, elapsed);
        if let Some(file) = self.values.get("--json") {
            fs::write(file, format!("{summary:#}\n"))?;
        }
        if let Some(file) = self.values.get("--records") {
            let lines: String = records.iter().map(|record| record.line() + "\n").collect();
            fs::write(file, lines)?;
        }
        println!("{}", report::table(std::slice::from_ref(&summary)));
        for name in ["servers", "errors", "statuses"] {
            if summary[name].as_object().is_some_and(|map| !map.is_empty()) {
                println!("{name}: {}", summary[name]);
            }
        }
        if records.iter().any(|record| record.matched.is_some()) {
            println!("predictions: {}", summary["predictions"]);
        }
        let failed = records.iter().filter_map(|record| Some((record, record.error.as_ref()?)));
        for (record, error) in failed {
            println!("failed: {} {} {error}", record.id, record.kind);
        }
        Ok(records.iter().all(|record| record.error.is_none()))
    }
}

fn chat_load(options: &Options) -> Result<bool> {
    let shape = chat::Shape {
        model: options.text("--model", "tiny"),
        seed: options.number("--seed", 1)?,
        sessions: options.number("--sessions", 24)?,
        turns: options.number("--turns", 6)?,
        systems: options.numbers("--systems", "200,400,800")?,
        user_words: options.number("--user-words", 40)?,
        max_tokens: options.number("--max-tokens", 24)?,
        stream: options.number("--stream", 1.0)?,
        completions: options.number("--completions", 0.0)?,
    };
    let (records, elapsed) = run::run(&options.pace()?, chat::Sessions::new(shape), chat::act)?;
    options.report(&records, elapsed)
}

fn mixed_load(options: &Options) -> Result<bool> {
    let shape = mixed::Shape {
        model: options.text("--model", "tiny"),
        seed: options.number("--seed", 1)?,
        requests: options.number("--requests", 1000)?,
        abort: options.number("--abort", 0.05)?,
    };
    let (records, elapsed) = run::run(&options.pace()?, mixed::Mixed::new(shape), mixed::act)?;
    options.report(&records, elapsed)
}

fn latencies(options: &Options) -> Result<bool> {
    let shape = latency::Shape {
        model: options.text("--model", "tiny"),
        seed: options.number("--seed", 1)?,
        arms: options.arms.clone(),
        prompt_tokens: options.numbers("--prompt-tokens", "6000")?,
        requests: options.number("--requests", 200)?,
    };
    let results = latency::measure(&shape)?;
    if let Some(file) = options.values.get("--json") {
        fs::write(file, format!("{:#}\n", Value::from(results.clone())))?;
    }
    println!("{}", latency::table(&results));
    Ok(true)
}

/// True where there are none.
fn newly_failed(files: &[String]) -> Result<bool> {
    let runs = summaries(files)?;
    let [before, after] = runs.as_slice() else { return Err("two files are wanted".into()) };
    let failed = report::newly_failed(before, after);
    failed.iter().for_each(|line| println!("{line}"));
    Ok(failed.is_empty())
}

/// True where the faults explain all that failed.
fn blame_faults(files: &[String]) -> Result<bool> {
    let [faults, records @ ..] = files else { return Err("a list of faults is wanted".into()) };
    let read = |file: &String| fs::read_to_string(file).map_err(|error| format!("{file}: {error}"));
    let faults = blame::faults(&read(faults)?)?;
    let mut tally = blame::Tally::default();
    for file in records {
        tally.add(&faults, &read(file)?)?;
    }
    tally.unexplained.iter().for_each(|line| println!("{line}"));
    println!("{}", tally.line());
    Ok(tally.unexplained.is_empty())
}

fn summaries(files: &[String]) -> Result<Vec<Value>> {
    let mut runs = Vec::new();
    for file in files {
        let text = fs::read_to_string(file).map_err(|error| format!("{file}: {error}"))?;
        runs.push(serde_json::from_str(&text).map_err(|error| format!("{file}: {error}"))?);
    }
    Ok(runs)
}
