//! The two calls that a request makes: body → tokens, on a job thread; tokens → overlap, in the
//! balancer. For a remote model there is one between them, on a thread that may wait: question →
//! tokens.
#![forbid(unsafe_code)]

use std::time::Instant;

use crate::blocks::{self, hash_prompt, hash_whole};
use crate::index::Index;
use crate::prompt::{Endpoint, Exact, Limits, Models, Outcome, Question, Step, Tokens};
use crate::remote::{RemoteError, Remotes};
use crate::shared::{
    Expected, MAX_BLOCKS, MAX_TOKENS, Mode, ModelKey, ServerField, ServerRow, Ticket, Zone,
};
use crate::trust;
use crate::types::{BlockHash, Overlap, ServerId, Skip};

/// The prompt tokens of a body, the reason why there are none, or what has to be asked. `known`
/// learns the model's number as soon as it is found, before the tokens are made.
pub fn tokenize(
    models: &Models,
    remotes: &Remotes,
    endpoint: Endpoint,
    body: &[u8],
    limits: &Limits,
    want_text: bool,
    known: impl FnOnce(usize),
) -> Step {
    match models.step(endpoint, body, limits, want_text, known) {
        Step::Ask(question) => match remotes.cached(question.model(), question.api, body) {
            Some(ids) => Step::Done(Outcome {
                model: Some(question.model()),
                result: Ok(question.answer(&ids)),
            }),
            None => Step::Ask(question),
        },
        done => done,
    }
}

/// Asks one of the model's servers, and waits for it. The error is the one behind the outcome's.
pub fn ask(
    remotes: &Remotes,
    question: Question,
    body: &[u8],
    deadline: Option<Instant>,
) -> (Outcome, Option<RemoteError>) {
    let model = question.model();
    let (result, error) = match remotes.ask(model, question.api, body, deadline) {
        Ok(ids) => (Ok(question.answer(&ids)), None),
        Err(error) => (Err(error.skip()), Some(error)),
    };
    (Outcome { model: Some(model), result }, error)
}

/// Room for lookups, kept from one to the next.
#[derive(Default)]
pub struct Scratch {
    hashes: Vec<BlockHash>,
    overlaps: Vec<Overlap>,
}

/// Tokens in a block of a server that has not told; what engines begin with.
const USUAL_BLOCK: u32 = 16;

/// What one server holds of a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Match {
    pub mode: Mode,
    /// Tokens in a block of this server; 0 until its events have told.
    pub block_size: u32,
    /// Whole blocks of the prompt that could be matched there.
    pub prompt_blocks: u32,
    pub overlap: Overlap,
    /// Blocks that the server holds as its events tell, whether or not they are believed.
    pub told: u32,
    /// The model has layers without full attention; see [`ServerField::Hybrid`].
    pub hybrid: bool,
}

/// What is believed of a server: nothing that events tell where our tokens for the model, or for
/// some model, are not the engine's.
pub fn believed(row: &ServerRow<'_>, model: Option<ModelKey>) -> Mode {
    if trust::is_trusted(row, model) { row.mode() } else { Mode::Approximate }
}

impl Match {
    pub fn matched_tokens(&self) -> u32 {
        self.overlap.blocks * self.block_size
    }

    fn none(zone: Zone<'_>, server: ServerId, model: Option<ModelKey>) -> Match {
        let row = zone.server(server);
        let mode = believed(&row, model);
        let told = row.get(ServerField::BlockSize) as u32;
        Match {
            mode,
            block_size: if told == 0 && mode.learns() { USUAL_BLOCK } else { told },
            hybrid: row.get(ServerField::Hybrid) == 1,
            ..Match::default()
        }
    }

    /// The longest of what events and what was routed tell. Both reach back to the start of the
    /// prompt, so one of them is the whole truth that is known.
    fn best(&self, server: ServerId, found: &[Overlap]) -> Overlap {
        let told = match self.mode {
            Mode::Approximate => Overlap::default(),
            Mode::Events | Mode::Partial => found[server.index()],
        };
        let learned = match self.mode.learns() {
            true => found[server.learned().index()],
            false => Overlap::default(),
        };
        if learned.blocks > told.blocks { learned } else { told }
    }
}

/// A prompt of a model.
pub type Prompt<'a> = (&'a Tokens, ModelKey);

/// What the servers hold of a prompt; without one nothing, but their modes. One hash chain and
/// one lookup for each block size in use.
pub fn overlap(
    zone: Zone<'_>,
    index: &Index<'_>,
    prompt: Option<Prompt<'_>>,
    servers: &[ServerId],
    scratch: &mut Scratch,
) -> Result<Vec<Match>, Skip> {
    let model = prompt.map(|(_, model)| model);
    let mut matches: Vec<Match> = servers.iter().map(|id| Match::none(zone, *id, model)).collect();
    let Some((tokens, _)) = prompt else { return Ok(matches) };
    let learns = matches.iter().any(|m| m.mode.learns());
    let last = |id: &ServerId| if learns { id.learned().index() } else { id.index() };
    let holders = servers.iter().map(|id| last(id) + 1).max().unwrap_or(0);
    scratch.overlaps.resize(holders, Overlap::default());
    let mut done = Vec::new();
    for at in 0..matches.len() {
        let size = matches[at].block_size;
        if size == 0 || matches[at].hybrid || done.contains(&size) {
            continue;
        }
        done.push(size);
        let (lora, salt) = (tokens.lora.as_deref(), tokens.salt.as_deref());
        hash_prompt(&zone.hash_key(), size, lora, salt, &tokens.ids, &mut scratch.hashes);
        index.lookup(&scratch.hashes, &mut scratch.overlaps).map_err(|_| Skip::IndexBusy)?;
        let same = |m: &&mut Match| m.block_size == size && !m.hybrid;
        for (m, id) in matches.iter_mut().zip(servers).filter(|(m, _)| same(m)) {
            m.prompt_blocks = scratch.hashes.len() as u32;
            m.told = scratch.overlaps[id.index()].blocks;
            m.overlap = m.best(*id, &scratch.overlaps);
        }
    }
    Ok(matches)
}

/// Notes that a prompt goes to a server whose events do not tell what it keeps.
pub fn learn(zone: Zone<'_>, tokens: &Tokens, server: ServerId, found: &Match) {
    if !found.mode.learns() || found.hybrid {
        return;
    }
    let (lora, salt) = (tokens.lora.as_deref(), tokens.salt.as_deref());
    let mut hashes = Vec::new();
    hash_whole(&zone.hash_key(), found.block_size, lora, salt, &tokens.ids, &mut hashes);
    let message: Vec<u64> = hashes.iter().map(|hash| hash.0).collect();
    if !message.is_empty() {
        // What finds no room is counted there.
        zone.routed().push(server, &message);
    }
}

/// Has the holder of the lease look out for the blocks that a prompt must leave on a server, if
/// its events tell them and they are not looked out for too often already. To be called before
/// the prompt is sent.
pub fn expect(
    zone: Zone<'_>,
    (tokens, model): Prompt<'_>,
    model_name: &str,
    server: ServerId,
    found: &Match,
) -> Option<Ticket> {
    let (size, told) = (found.block_size as usize, found.told as usize);
    let row = zone.server(server);
    let follows = row.mode() == Mode::Events
        && row.get(ServerField::BlockSize) == u64::from(found.block_size)
        && !found.hybrid;
    let whole = tokens.ids.len().checked_div(size)?;
    if !follows || tokens.exact != Exact::Yes || whole <= told || size > MAX_TOKENS {
        return None;
    }
    let ticket = zone.checks().take(server)?;
    let last = whole.min(told + MAX_BLOCKS.min(MAX_TOKENS / size));
    let (key, lora) = (zone.hash_key(), tokens.lora.as_deref());
    let mut hashes = Vec::new();
    let known = &tokens.ids[..last * size];
    hash_whole(&key, found.block_size, lora, tokens.salt.as_deref(), known, &mut hashes);
    let start = match told {
        0 => blocks::root(&key, found.block_size, lora),
        _ => hashes[told - 1],
    };
    zone.checks().send(
        ticket,
        &Expected {
            server,
            model,
            model_name: model_name.to_owned(),
            block_size: found.block_size,
            first: found.told,
            start,
            blocks: hashes.split_off(told),
            tokens: tokens.ids[told * size..last * size].to_vec(),
        },
    );
    Some(ticket)
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

    const MODEL: ModelKey = ModelKey(7);

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

    fn words() -> Vec<AtomicU64> {
        (0..MIN_ZONE_BYTES / 8).map(|_| AtomicU64::new(0)).collect()
    }

    fn world(words: &[AtomicU64]) -> (Zone<'_>, Index<'_>, Writer<'_>) {
        let zone = Zone::format(words, HashKey([5, 6])).unwrap();
        let index = Index::format(zone.index_words()).unwrap();
        let (writer, _) = Writer::attach(zone.index_words()).unwrap();
        (zone, index, writer)
    }

    /// Lets `holder` hold the first blocks of a prompt.
    fn hold(zone: Zone<'_>, writer: &mut Writer<'_>, holder: ServerId, size: u32, blocks: usize) {
        let (mut hashes, prompt) = (Vec::new(), tokens((0..65).collect(), None));
        hash_prompt(&zone.hash_key(), size, None, None, &prompt.ids, &mut hashes);
        let chain: Vec<Stored> = hashes
            .iter()
            .take(blocks)
            .map(|block| Stored { engine: EngineHash(block.0), block: *block })
            .collect();
        assert_eq!(writer.store(holder, Tier::Gpu, None, &chain, true).stored, blocks as u32);
    }

    #[test]
    fn each_server_is_asked_in_its_own_block_size() {
        let words = words();
        let (zone, index, mut writer) = world(&words);
        let prompt = tokens((0..65).collect(), None);
        let servers = [(ServerId(3), 16), (ServerId(7), 32), (ServerId(9), 16), (ServerId(11), 0)];
        for (id, size) in servers {
            zone.server(id).set_mode(Mode::Events);
            zone.server(id).set(ServerField::BlockSize, size);
        }
        for (id, size, held) in [(ServerId(3), 16, 3), (ServerId(7), 32, 1), (ServerId(9), 16, 2)] {
            hold(zone, &mut writer, id, size, held);
        }
        let ids = servers.map(|(id, _)| id);
        let mut scratch = Scratch::default();
        let mut found = |tokens: Option<&Tokens>| -> Vec<(u32, u32)> {
            let prompt = tokens.map(|tokens| (tokens, MODEL));
            let all = overlap(zone, &index, prompt, &ids, &mut scratch).unwrap();
            all.iter().map(|m| (m.matched_tokens(), m.prompt_blocks)).collect()
        };
        assert_eq!(found(Some(&prompt)), [(48, 4), (32, 2), (32, 4), (0, 0)]);
        assert_eq!(found(None), [(0, 0); 4]);
        zone.server(ServerId(7)).set(ServerField::Hybrid, 1);
        assert_eq!(found(Some(&prompt)), [(48, 4), (0, 0), (32, 4), (0, 0)]);
        zone.server(ServerId(7)).set(ServerField::Hybrid, 0);
        let salted = tokens((0..65).collect(), Some("s"));
        assert_eq!(found(Some(&salted)), [(0, 4), (0, 2), (0, 4), (0, 0)]);
    }

    #[test]
    fn the_mode_says_what_is_believed() {
        let words = words();
        let (zone, index, mut writer) = world(&words);
        let id = ServerId(2);
        hold(zone, &mut writer, id, 16, 1);
        hold(zone, &mut writer, id.learned(), 16, 3);
        let prompt = tokens((0..65).collect(), None);
        for (mode, size, blocks) in [
            (Mode::Events, 16, 1),
            (Mode::Partial, 16, 3),
            (Mode::Approximate, 16, 3),
            (Mode::Approximate, 0, 3),
            (Mode::Events, 0, 0),
        ] {
            zone.server(id).set_mode(mode);
            zone.server(id).set(ServerField::BlockSize, size);
            let prompt = Some((&prompt, MODEL));
            let found = overlap(zone, &index, prompt, &[id], &mut Scratch::default());
            assert_eq!(found.unwrap()[0].overlap.blocks, blocks, "{mode:?} {size}");
        }
    }

    #[test]
    fn all_whole_blocks_are_learned_where_events_do_not_tell() {
        let words = words();
        let (zone, ..) = world(&words);
        let id = ServerId(2);
        let prompt = tokens((0..64).collect(), None);
        for mode in [Mode::Events, Mode::Approximate] {
            zone.server(id).set_mode(mode);
            learn(zone, &prompt, id, &Match::none(zone, id, None));
        }
        let mut hashes = Vec::new();
        hash_whole(&zone.hash_key(), 16, None, None, &prompt.ids, &mut hashes);
        assert_eq!(hashes.len(), 4);
        let piece = zone.routed().take(1).unwrap();
        assert_eq!(piece.server, id);
        assert_eq!(piece.words, hashes.iter().map(|hash| hash.0).collect::<Vec<_>>());
        assert_eq!(zone.routed().take(1), None);
    }

    #[test]
    fn what_a_prompt_must_leave_follows_what_events_tell() {
        let words = words();
        let (zone, index, mut writer) = world(&words);
        let (id, prompt) = (ServerId(2), tokens((0..64).collect(), None));
        zone.server(id).set_mode(Mode::Events);
        zone.server(id).set(ServerField::BlockSize, 16);
        let expected = |prompt: &Tokens| {
            let asked = Some((prompt, MODEL));
            let found = overlap(zone, &index, asked, &[id], &mut Scratch::default()).unwrap();
            let ticket = expect(zone, (prompt, MODEL), "m", id, &found[0])?;
            let expected = zone.checks().read(ticket);
            zone.checks().free(ticket);
            Some(expected)
        };
        let mut hashes = Vec::new();
        hash_whole(&zone.hash_key(), 16, None, None, &prompt.ids, &mut hashes);
        let first = expected(&prompt).unwrap();
        assert_eq!(first.blocks, hashes);
        assert_eq!((first.first, first.start), (0, blocks::root(&zone.hash_key(), 16, None)));
        assert_eq!(first.tokens, prompt.ids);
        hold(zone, &mut writer, id, 16, 3);
        let next = expected(&prompt).unwrap();
        assert_eq!((next.first, next.start), (3, hashes[2]));
        assert_eq!((next.blocks, next.tokens), (vec![hashes[3]], prompt.ids[48..].to_vec()));
        let inexact = Tokens { exact: Exact::No("date"), ..prompt.clone() };
        assert_eq!(expected(&inexact), None);
        assert_eq!(expected(&tokens((0..15).collect(), None)), None);
        zone.server(id).set_mode(Mode::Partial);
        assert_eq!(expected(&prompt), None);
    }
}
