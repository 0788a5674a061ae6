//! The command line.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use crate::wire::{Format, Framing, HashKind};

pub const USAGE: &str = "usage: mock-engine [option value]...
  --listen ADDR         HTTP address                          127.0.0.1:9001
  --events ENDPOINT     where events are published, or off    tcp://127.0.0.1:9101
  --replay ENDPOINT     where they can be asked for, or off   tcp://127.0.0.1:9102
  --model NAME          served model name                     tiny
  --tokenizer DIR       its tokenizer and template            t/models/tiny
  --api-key KEY         bearer that /v1 asks for              none
  --lora NAMES          adapters on it, comma-separated
  --block-size N        tokens in a block                     16
  --blocks N            physical blocks; one is never used    4096
  --max-model-len N     tokens of a prompt and its answer     131072
  --prefill-rate N      tokens/s, 0: no time at all           20000
  --chunk N             prefill tokens of one step            2048
  --decode-ms N         of one step that decodes              2
  --max-seqs N          requests that run at once             256
  --keepalive SECONDS   idle connections are closed after     5
  --topic TEXT          of the events                         (empty)
  --format KIND         map, array (0.23) or array-old (0.11) map
  --framing KIND        of replay: new (0.28) or old          new with map, else old
  --hash KIND           int or bytes                          int
  --dp-rank N           data-parallel rank in each batch      0
  --ranks N             data-parallel ranks, on the next ports 1
  --buffer-steps N      batches kept for replay               10000
A rate or a time may have a fraction.";

#[derive(Clone, Debug)]
pub struct Options {
    pub listen: String,
    pub events: Option<String>,
    pub replay: Option<String>,
    pub model: String,
    pub tokenizer: PathBuf,
    pub loras: Vec<String>,
    pub api_key: Option<String>,
    pub block_size: usize,
    pub blocks: usize,
    pub max_model_len: usize,
    /// Tokens a second; none: prefill takes no time.
    pub prefill_rate: Option<f64>,
    pub chunk: usize,
    pub decode: Duration,
    pub max_seqs: usize,
    pub keepalive: Duration,
    pub topic: String,
    pub format: Format,
    pub framing: Option<Framing>,
    pub hash: HashKind,
    pub dp_rank: u32,
    pub ranks: u32,
    pub buffer_steps: usize,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            listen: "127.0.0.1:9001".to_owned(),
            events: Some("tcp://127.0.0.1:9101".to_owned()),
            replay: Some("tcp://127.0.0.1:9102".to_owned()),
            model: "tiny".to_owned(),
            tokenizer: PathBuf::from("t/models/tiny"),
            loras: Vec::new(),
            api_key: None,
            block_size: 16,
            blocks: 4096,
            max_model_len: 131_072,
            prefill_rate: Some(20_000.0),
            chunk: 2048,
            decode: Duration::from_millis(2),
            max_seqs: 256,
            keepalive: Duration::from_secs(5),
            topic: String::new(),
            format: Format::Map,
            framing: None,
            hash: HashKind::Int,
            dp_rank: 0,
            ranks: 1,
            buffer_steps: 10_000,
        }
    }
}

impl Options {
    /// None where help was asked for.
    /// What another data-parallel rank has: its batches say so, and its ports are the next ones.
    pub fn of_rank(&self, rank: u32) -> Options {
        let shift = |endpoint: &String| {
            let counted = endpoint.rsplit_once(':').and_then(|(host, port)| {
                Some(format!("{host}:{}", port.parse::<u32>().ok()? + rank))
            });
            counted.unwrap_or_else(|| endpoint.clone())
        };
        Options {
            events: self.events.as_ref().map(shift),
            replay: self.replay.as_ref().map(shift),
            dp_rank: self.dp_rank + rank,
            ..self.clone()
        }
    }

    pub fn parse(args: impl Iterator<Item = String>) -> Result<Option<Options>, String> {
        let mut options = Options::default();
        let mut args = args;
        while let Some(name) = args.next() {
            if name == "--help" || name == "-h" {
                return Ok(None);
            }
            let value = args.next().ok_or_else(|| format!("{name} has no value"))?;
            options.set(&name, &value)?;
        }
        if options.block_size == 0 || options.blocks < 2 || options.chunk == 0 {
            return Err("--block-size and --chunk must be positive, --blocks at least 2".to_owned());
        }
        Ok(Some(options))
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let endpoint = || (value != "off").then(|| value.to_owned());
        match name {
            "--listen" => self.listen = value.to_owned(),
            "--events" => self.events = endpoint(),
            "--replay" => self.replay = endpoint(),
            "--model" => self.model = value.to_owned(),
            "--tokenizer" => self.tokenizer = PathBuf::from(value),
            "--lora" => self.loras = value.split(',').map(str::to_owned).collect(),
            "--api-key" => self.api_key = Some(value.to_owned()),
            "--block-size" => self.block_size = number(name, value)?,
            "--blocks" => self.blocks = number(name, value)?,
            "--max-model-len" => self.max_model_len = number(name, value)?,
            "--prefill-rate" => {
                let rate: f64 = number(name, value)?;
                self.prefill_rate = (rate > 0.0).then_some(rate);
            }
            "--chunk" => self.chunk = number(name, value)?,
            "--decode-ms" => self.decode = seconds(name, value, 1e-3)?,
            "--max-seqs" => self.max_seqs = number(name, value)?,
            "--keepalive" => self.keepalive = seconds(name, value, 1.0)?,
            "--topic" => self.topic = value.to_owned(),
            "--format" => self.format = value.parse()?,
            "--framing" => self.framing = Some(value.parse()?),
            "--hash" => self.hash = value.parse()?,
            "--dp-rank" => self.dp_rank = number(name, value)?,
            "--ranks" => self.ranks = number::<u32>(name, value)?.max(1),
            "--buffer-steps" => self.buffer_steps = number(name, value)?,
            _ => return Err(format!("unknown option {name}")),
        }
        Ok(())
    }
}

fn number<T: FromStr>(name: &str, value: &str) -> Result<T, String> {
    value.parse().map_err(|_| format!("{name}: \"{value}\" is no number"))
}

fn seconds(name: &str, value: &str, unit: f64) -> Result<Duration, String> {
    Duration::try_from_secs_f64(number::<f64>(name, value)? * unit)
        .map_err(|_| format!("{name}: \"{value}\" is no time"))
}
