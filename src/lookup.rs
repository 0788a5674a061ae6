//! The two calls that a request makes: body → tokens, on a job thread; tokens → overlap, in the
//! balancer.
#![forbid(unsafe_code)]

use crate::blocks::hash_prompt;
use crate::index::Index;
use crate::prompt::{Endpoint, Limits, Models, Outcome, Tokens};
use crate::shared::{MAX_SERVERS, Mode, ServerField, Zone};
use crate::types::{BlockHash, Overlap, ServerId, Skip};

/// The prompt tokens of a body, or the reason why there are none. `known` learns the model's
/// number as soon as it is found, before the tokens are made.
pub fn tokenize(
    models: &Models,
    endpoint: Endpoint,
    body: &[u8],
    limits: &Limits,
    want_text: bool,
    known: impl FnOnce(usize),
) -> Outcome {
    models.tokenize(endpoint, body, limits, want_text, known)
}

/// Room for lookups, kept from one to the next.
#[derive(Default)]
pub struct Scratch {
    hashes: Vec<BlockHash>,
    overlaps: Vec<Overlap>,
}

/// What one server holds of a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Match {
    pub mode: Mode,
    /// Tokens in a block of this server; 0 until its events have told.
    pub block_size: u32,
    /// Whole blocks of the prompt that could be matched there.
    pub prompt_blocks: u32,
    pub overlap: Overlap,
    /// The model has layers without full attention; see [`ServerField::Hybrid`].
    pub hybrid: bool,
}

impl Match {
    pub fn matched_tokens(&self) -> u32 {
        self.overlap.blocks * self.block_size
    }

    fn none(zone: Zone<'_>, server: ServerId) -> Match {
        let row = zone.server(server);
        Match {
            mode: row.mode(),
            block_size: row.get(ServerField::BlockSize) as u32,
            hybrid: row.get(ServerField::Hybrid) == 1,
            ..Match::default()
        }
    }

    fn is_credited(&self) -> bool {
        self.mode != Mode::Approximate && !self.hybrid
    }
}

/// What the servers hold of a prompt; without tokens nothing, but their modes. One hash chain and
/// one lookup for each block size in use.
pub fn overlap(
    zone: Zone<'_>,
    index: &Index<'_>,
    tokens: Option<&Tokens>,
    servers: &[ServerId],
    scratch: &mut Scratch,
) -> Result<Vec<Match>, Skip> {
    let mut matches: Vec<Match> = servers.iter().map(|id| Match::none(zone, *id)).collect();
    let Some(tokens) = tokens else { return Ok(matches) };
    scratch.overlaps.resize(MAX_SERVERS, Overlap::default());
    let mut done = Vec::new();
    for at in 0..matches.len() {
        let size = matches[at].block_size;
        if size == 0 || !matches[at].is_credited() || done.contains(&size) {
            continue;
        }
        done.push(size);
        let (lora, salt) = (tokens.lora.as_deref(), tokens.salt.as_deref());
        hash_prompt(&zone.hash_key(), size, lora, salt, &tokens.ids, &mut scratch.hashes);
        index.lookup(&scratch.hashes, &mut scratch.overlaps).map_err(|_| Skip::IndexBusy)?;
        let same = |m: &&mut Match| m.block_size == size && m.is_credited();
        for (m, id) in matches.iter_mut().zip(servers).filter(|(m, _)| same(m)) {
            m.prompt_blocks = scratch.hashes.len() as u32;
            m.overlap = scratch.overlaps[id.index()];
        }
    }
    Ok(matches)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;
    use crate::blocks::HashKey;
    use crate::index::{Stored, Writer};
    use crate::prompt::Exact;
    use crate::shared::MIN_ZONE_BYTES;
    use crate::types::{EngineHash, Tier};

    fn tokens(ids: Vec<u32>, salt: Option<&str>) -> Tokens {
        Tokens {
            model: 0,
            ids,
            exact: Exact::Yes,
            salt: salt.map(str::to_owned),
            lora: None,
            text_len: 0,
            text: None,
            stream: false,
        }
    }

    #[test]
    fn each_server_is_asked_in_its_own_block_size() {
        let words: Vec<AtomicU64> = (0..MIN_ZONE_BYTES / 8).map(|_| AtomicU64::new(0)).collect();
        let zone = Zone::format(&words, HashKey([5, 6])).unwrap();
        let index = Index::format(zone.index_words()).unwrap();
        let (mut writer, _) = Writer::attach(zone.index_words()).unwrap();
        let prompt = tokens((0..65).collect(), None);
        let servers = [(ServerId(3), 16), (ServerId(7), 32), (ServerId(9), 16), (ServerId(11), 0)];
        for (id, size) in servers {
            zone.server(id).set_mode(Mode::Events);
            zone.server(id).set(ServerField::BlockSize, size);
        }
        zone.server(ServerId(9)).set_mode(Mode::Approximate);
        for (id, held) in [(ServerId(3), 3), (ServerId(7), 1), (ServerId(9), 2)] {
            let size = zone.server(id).get(ServerField::BlockSize) as u32;
            let mut hashes = Vec::new();
            hash_prompt(&zone.hash_key(), size, None, None, &prompt.ids, &mut hashes);
            let blocks: Vec<Stored> = hashes
                .iter()
                .take(held)
                .map(|block| Stored { engine: EngineHash(block.0), block: *block })
                .collect();
            assert_eq!(writer.store(id, Tier::Gpu, None, &blocks, true).stored, held as u32);
        }
        let ids = servers.map(|(id, _)| id);
        let mut scratch = Scratch::default();
        let mut found = |tokens: Option<&Tokens>| -> Vec<(u32, u32)> {
            let all = overlap(zone, &index, tokens, &ids, &mut scratch).unwrap();
            all.iter().map(|m| (m.matched_tokens(), m.prompt_blocks)).collect()
        };
        assert_eq!(found(Some(&prompt)), [(48, 4), (32, 2), (0, 0), (0, 0)]);
        assert_eq!(found(None), [(0, 0); 4]);
        zone.server(ServerId(7)).set(ServerField::Hybrid, 1);
        assert_eq!(found(Some(&prompt)), [(48, 4), (0, 0), (0, 0), (0, 0)]);
        zone.server(ServerId(7)).set(ServerField::Hybrid, 0);
        let salted = tokens((0..65).collect(), Some("s"));
        assert_eq!(found(Some(&salted)), [(0, 4), (0, 2), (0, 0), (0, 0)]);
    }
}
