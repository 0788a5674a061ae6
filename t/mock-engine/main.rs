//! A stand-in for a vLLM server: the OpenAI API with a prefix cache, its events, and faults on
//! command. It has no model: the time that prefill and decode take is slept, answers are made up.
//!
//! | module | what it holds |
//! | --- | --- |
//! | `cache` | physical blocks, hash chains, eviction, as in vLLM's block pool |
//! | `engine` | the scheduler: waiting and running requests, one step at a time |
//! | `tokenizer` | requests → ids, on the module's own prompt path |
//! | `answer` | what is answered to a prompt |
//! | `wire` | events → msgpack, in the layouts of several versions |
//! | `publisher` | the PUB socket, the replay buffer and its ROUTER |
//! | `http` | HTTP/1.1 with keep-alive and chunked bodies |
//! | `api` | the paths that a client or a gateway asks for |
//! | `render` | the ids of a request, as a gateway asks for them |
//! | `control` | `/mock/…`: faults, state, what was received last |
#![forbid(unsafe_code)]

mod answer;
mod api;
mod cache;
mod control;
mod engine;
mod http;
mod options;
mod publisher;
mod render;
mod tokenizer;
mod wire;

use std::error::Error;
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::thread;

use api::Server;
use options::Options;

fn main() -> ExitCode {
    let options = match Options::parse(std::env::args().skip(1)) {
        Ok(Some(options)) => options,
        Ok(None) => {
            println!("{}", options::USAGE);
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("mock-engine: {error}\n\n{}", options::USAGE);
            return ExitCode::from(2);
        }
    };
    if let Err(error) = with_one_tokenizer_thread() {
        eprintln!("mock-engine: {error}");
        return ExitCode::FAILURE;
    }
    match serve(options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("mock-engine: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The tokenizer's own threads would spin; the library reads this once, before it starts any, and
/// setting it in a running process is not safe.
fn with_one_tokenizer_thread() -> std::io::Result<()> {
    const THREADS: &str = "FASTOKENS_BPE_THREADS";
    if std::env::var_os(THREADS).is_some() {
        return Ok(());
    }
    let mut again = Command::new(std::env::current_exe()?);
    Err(again.args(std::env::args_os().skip(1)).env(THREADS, "1").exec())
}

/// Serves until the process is killed.
fn serve(options: Options) -> Result<(), Box<dyn Error>> {
    let listener = TcpListener::bind(&options.listen)
        .map_err(|error| format!("cannot listen on {}: {error}", options.listen))?;
    let address = listener.local_addr()?.to_string();
    let server = Arc::new(Server::new(options, address.clone())?);
    for engine in server.engines.clone() {
        thread::Builder::new().name("engine".to_owned()).spawn(move || engine.run())?;
    }
    println!("mock-engine: ready on {address}");
    for stream in listener.incoming() {
        let Ok(stream) = stream else { continue };
        let server = server.clone();
        // A connection that cannot get a thread is closed, as by a server at its limit.
        let _ = thread::Builder::new().spawn(move || server.connection(stream));
    }
    Ok(())
}
