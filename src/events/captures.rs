//! What real engines published, applied; what they found cached, foretold.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;

use serde_json::Value;

use super::apply::{Applier, Habits};
use super::sequence::{Live, Mark, Sequence};
use super::wire::{self, KvEvent, Reply};
use crate::blocks::{HashKey, hash_prompt};
use crate::index::{Index, Writer};
use crate::shared::{Dropped, MIN_ZONE_BYTES, ServerField, Zone};
use crate::types::{Overlap, ServerId};

/// Requests overlap in time there, or blocks are announced without being stored, or nothing is
/// credited, or images have keys that are not known.
const LOOSE: [&str; 8] = [
    "concurrent",
    "abort",
    "report_mode",
    "data_parallel",
    "b32_48blocks_eviction.",
    "hybrid",
    "gptoss",
    "image",
];

fn files() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("t/captures");
    let mut files: Vec<PathBuf> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "jsonl"))
        .collect();
    files.sort();
    assert!(files.len() > 30, "{}", files.len());
    files
}

fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn frames(encoded: &Value) -> Vec<Vec<u8>> {
    encoded.as_array().unwrap().iter().map(|frame| base64(frame.as_str().unwrap())).collect()
}

fn base64(text: &str) -> Vec<u8> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => byte - b'A',
        b'a'..=b'z' => byte - b'a' + 26,
        b'0'..=b'9' => byte - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => panic!("{byte}"),
    };
    let digits: Vec<u8> = text.bytes().filter(|byte| *byte != b'=').map(digit).collect();
    let word = |four: &[u8]| {
        let bits = four.iter().fold(0u32, |bits, digit| bits << 6 | u32::from(*digit));
        (bits << (6 * (4 - four.len()))).to_be_bytes()[1..four.len()].to_vec()
    };
    digits.chunks(4).flat_map(word).collect()
}

struct Played {
    zone: Zone<'static>,
    applier: Applier<'static>,
    sequences: BTreeMap<String, Sequence>,
    habits: Habits,
    /// A reset was asked for, which the engine tells with its next step.
    stale: bool,
    exact: u32,
    over: u32,
    under: u32,
}

impl Played {
    fn new() -> Played {
        let words: Vec<AtomicU64> = (0..MIN_ZONE_BYTES / 8).map(|_| AtomicU64::new(0)).collect();
        let zone = Zone::format(words.leak(), HashKey([11, 13])).unwrap();
        Index::format(zone.index_words()).unwrap();
        let (writer, _) = Writer::attach(zone.index_words()).unwrap();
        Played {
            zone,
            applier: Applier::new(writer, zone),
            sequences: BTreeMap::new(),
            habits: Habits::default(),
            stale: false,
            exact: 0,
            over: 0,
            under: 0,
        }
    }

    fn event(&mut self, line: &Value) {
        let frames = frames(&line["frames"]);
        let numbered = wire::live(&frames).unwrap();
        let batch = wire::batch(numbered.payload).unwrap();
        assert!(batch.events.iter().all(Result::is_ok), "{:?}", batch.events);
        assert_eq!(wire::outline(numbered.payload), Ok((batch.timestamp, batch.rank)));
        let digest = wire::digest(numbered.payload);
        let mark = Mark { seq: numbered.seq, digest, timestamp: batch.timestamp };
        let source = line["source"].as_str().unwrap_or("").to_owned();
        let sequence = self.sequences.entry(source.clone()).or_default();
        let first = if numbered.seq == 0 { Live::Apply } else { Live::Adopt };
        let expected = if sequence.next() == 0 { first } else { Live::Apply };
        assert_eq!(sequence.live(mark, false), expected);
        self.stale &= !batch.events.contains(&Ok(KvEvent::Cleared));
        let id = ServerId(u16::from(source.ends_with('1')));
        self.applier.apply(id, None, &mut self.habits, &batch, mark, sequence.origin());
    }

    fn matched_tokens(&self, request: &Value, tokens: &[u32]) -> u64 {
        let body = &request["body"];
        let row = self.zone.server(ServerId(0));
        if row.get(ServerField::Hybrid) == 1 {
            return 0;
        }
        let size = row.get(ServerField::BlockSize) as u32;
        let lora = body["model"].as_str().filter(|model| model.starts_with("lora-"));
        let mut hashes = Vec::new();
        let salt = body["cache_salt"].as_str();
        hash_prompt(&self.zone.hash_key(), size, lora, salt, tokens, &mut hashes);
        let mut overlaps = [Overlap::default(); 2];
        let index = Index::open(self.zone.index_words()).unwrap();
        index.lookup(&hashes, &mut overlaps).unwrap();
        let rank = request["headers"]["X-data-parallel-rank"].as_str() == Some("1");
        u64::from(overlaps[usize::from(rank)].blocks * size)
    }

    fn foretold(&mut self, what: &str, foretold: u64, cached: u64, strict: bool) {
        match foretold.cmp(&cached) {
            std::cmp::Ordering::Equal => self.exact += 1,
            std::cmp::Ordering::Greater => self.over += 1,
            std::cmp::Ordering::Less => self.under += 1,
        }
        assert!(!strict || foretold == cached, "{what}: foretold {foretold}, cached {cached}");
    }
}

/// The engine's own token ids of each prompt of a request.
fn prompts(request: &Value) -> Vec<Vec<u32>> {
    let ids = |ids: &Value| -> Option<Vec<u32>> {
        ids.as_array()?.iter().map(|id| Some(id.as_u64()? as u32)).collect()
    };
    let render = &request["render"];
    if render["status"] == 200 {
        let answer = &render["json"];
        let many = answer.as_array().cloned().unwrap_or_else(|| vec![answer.clone()]);
        return many.iter().map(|prompt| ids(&prompt["token_ids"]).unwrap()).collect();
    }
    let own = ids(&request["tokenize"]["json"]["tokens"]);
    own.or_else(|| ids(&request["body"]["prompt"])).into_iter().collect()
}

fn cached(response: &Value) -> Option<u64> {
    let usage = response["json"].get("usage")?;
    let details = |name: &str| usage[name]["cached_tokens"].as_u64();
    let found = details("prompt_tokens_details").or_else(|| details("input_tokens_details"));
    // An absent count is zero in old versions.
    Some(found.or_else(|| usage["cache_read_input_tokens"].as_u64()).unwrap_or(0))
}

fn play(path: &Path) -> Played {
    let name = path.file_name().unwrap().to_str().unwrap();
    let loose = LOOSE.iter().any(|part| name.contains(part));
    // That version's events do not tell the salt.
    let saltless = name.starts_with("v0.11") && name.contains("salt");
    let mut played = Played::new();
    let mut open: BTreeMap<String, (u64, bool)> = BTreeMap::new();
    for line in lines(path) {
        match line["kind"].as_str().unwrap() {
            "event" => played.event(&line),
            "admin" => played.stale = true,
            "request" => {
                let prompts = prompts(&line);
                let sum = prompts.iter().map(|ids| played.matched_tokens(&line, ids)).sum();
                let body = &line["body"];
                // Several sequences of one request run beside each other.
                let alone = prompts.len() == 1 && body["n"].as_u64().unwrap_or(1) == 1;
                let unread = body["echo"] == true && !body["logprobs"].is_null();
                let strict = alone && !(loose || saltless || unread || played.stale);
                open.insert(line["id"].as_str().unwrap().to_owned(), (sum, strict));
            }
            "response" => {
                let id = line["id"].as_str().unwrap();
                let (sum, strict) = open.remove(id).unwrap();
                if let Some(cached) = cached(&line) {
                    played.foretold(&format!("{name} {id}"), sum, cached, strict);
                }
            }
            _ => {}
        }
    }
    played
}

#[test]
fn what_was_cached_is_foretold() {
    let mut strict = 0;
    for path in files() {
        let played = play(&path);
        let Played { exact, over, under, .. } = played;
        println!("{}: exact {exact}, over {over}, under {under}", path.display());
        strict += exact;
        for reason in Dropped::ALL {
            for row in [ServerId(0), ServerId(1)].map(|id| played.zone.server(id)) {
                // Of a model without full attention in every layer some groups are left out.
                let left_out = row.get(ServerField::Hybrid) == 1 && *reason == Dropped::Group;
                assert_eq!(row.dropped(*reason) > 0, left_out, "{}", reason.name());
            }
        }
    }
    assert!(strict > 200, "{strict}");
}

#[test]
fn replays_of_every_version_are_read() {
    let mut ends = 0;
    for path in files() {
        let mut batches = BTreeMap::new();
        for line in lines(&path) {
            if line["kind"] == "event" {
                let frames = frames(&line["frames"]);
                let numbered = wire::live(&frames).unwrap();
                batches.insert(numbered.seq, wire::digest(numbered.payload));
            }
            if line["kind"] != "replay" {
                continue;
            }
            let start = line["start_seq"].as_u64().unwrap();
            assert_eq!(frames(&line["request_frames"]), wire::replay_request(start));
            for reply in line["reply_frames"].as_array().unwrap() {
                let frames = frames(reply);
                match wire::reply(&frames).unwrap() {
                    Reply::End => ends += 1,
                    Reply::Batch(numbered) => {
                        let live = batches.get(&numbered.seq);
                        assert!(live.is_none_or(|live| *live == wire::digest(numbered.payload)));
                        assert!(wire::batch(numbered.payload).is_ok());
                    }
                }
            }
        }
    }
    assert_eq!(ends, 12);
}
