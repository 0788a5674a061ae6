//! The words of the domain.
#![forbid(unsafe_code)]

use std::fmt;

/// A token id of the model's vocabulary.
pub type TokenId = u32;

/// Our keyed hash of a block together with everything before it; what the index is keyed by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(pub u64);

/// The engine's own name for a block, folded to 64 bits. Only means something within one server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EngineHash(pub u64);

/// Most servers (addresses × ranks) that can be told apart.
pub const MAX_SERVERS: usize = 1024;

/// Row of one server (an address and a data-parallel rank) in the shared zone's server table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServerId(pub u16);

impl ServerId {
    pub fn index(self) -> usize {
        usize::from(self.0)
    }

    /// The holder under which the index keeps what was routed to this server, apart from what its
    /// events tell.
    pub fn learned(self) -> ServerId {
        ServerId(self.0 + MAX_SERVERS as u16)
    }
}

/// Where an engine keeps a block, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Tier {
    Gpu = 0,
    Cpu = 1,
    Ssd = 2,
    Remote = 3,
}

impl Tier {
    pub const COUNT: usize = 4;
    pub const ALL: [Tier; Tier::COUNT] = [Tier::Gpu, Tier::Cpu, Tier::Ssd, Tier::Remote];

    pub fn name(self) -> &'static str {
        match self {
            Tier::Gpu => "gpu",
            Tier::Cpu => "cpu",
            Tier::Ssd => "ssd",
            Tier::Remote => "remote",
        }
    }

    /// The tier that an event's `medium` names, whatever its case; absent means GPU.
    pub fn from_medium(medium: Option<&str>) -> Option<Tier> {
        let Some(medium) = medium else { return Some(Tier::Gpu) };
        match medium.to_ascii_uppercase().as_str() {
            "GPU" | "DEVICE" => Some(Tier::Gpu),
            "CPU" | "CPU_PINNED" | "CPU_TIER1" | "CPU_TIER2" | "HOST" => Some(Tier::Cpu),
            "DISK" | "SSD" | "STORAGE" => Some(Tier::Ssd),
            "EXTERNAL" | "REMOTE" => Some(Tier::Remote),
            _ => None,
        }
    }
}

/// How much of one prompt one server holds.
///
/// `blocks` counts from the first block without a hole, each block in whatever tier holds it;
/// `tiers[t]` is how many of those have `t` as their best tier, so the tiers add up to `blocks`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overlap {
    pub blocks: u32,
    pub tiers: [u32; Tier::COUNT],
}

/// Why a request is balanced by load alone. The text after `skip:` in `$kvc_aware_status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Skip {
    /// `kvc_aware_route` is off, or the request is a subrequest.
    Off,
    Method,
    Path,
    NoBody,
    BadJson,
    NoModel,
    UnknownModel,
    /// The model's folder could not be loaded (`optional`).
    ModelUnavailable,
    /// The worker is still loading its tokenizers.
    Starting,
    /// The prompt holds an image, audio or another non-text part.
    Multimodal,
    /// The engine will refuse this request.
    Refused,
    /// A request feature that our prompt path does not reproduce exactly.
    Unsupported,
    Deadline,
    QueueFull,
    /// The template or the tokenizer failed, or our own code did.
    Failed,
    /// No server of a remote model gave its tokens.
    RemoteFailed,
    /// The index changed faster than it could be read.
    IndexBusy,
}

impl Skip {
    pub const ALL: [Skip; 17] = [
        Skip::Off,
        Skip::Method,
        Skip::Path,
        Skip::NoBody,
        Skip::BadJson,
        Skip::NoModel,
        Skip::UnknownModel,
        Skip::ModelUnavailable,
        Skip::Starting,
        Skip::Multimodal,
        Skip::Refused,
        Skip::Unsupported,
        Skip::Deadline,
        Skip::QueueFull,
        Skip::Failed,
        Skip::RemoteFailed,
        Skip::IndexBusy,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Skip::Off => "off",
            Skip::Method => "method",
            Skip::Path => "path",
            Skip::NoBody => "no_body",
            Skip::BadJson => "bad_json",
            Skip::NoModel => "no_model",
            Skip::UnknownModel => "unknown_model",
            Skip::ModelUnavailable => "model_unavailable",
            Skip::Starting => "starting",
            Skip::Multimodal => "multimodal",
            Skip::Refused => "refused",
            Skip::Unsupported => "unsupported",
            Skip::Deadline => "deadline",
            Skip::QueueFull => "queue_full",
            Skip::Failed => "failed",
            Skip::RemoteFailed => "remote_failed",
            Skip::IndexBusy => "index_busy",
        }
    }
}

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "skip:{}", self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::{Dropped, ServerError};

    /// Users look up what they see: each word that the module says of a failure is in README.
    #[test]
    fn readme_explains_each_reason() {
        let readme = include_str!("../README.md");
        let skips = Skip::ALL.map(Skip::name).into_iter();
        let errors = ServerError::ALL.iter().map(|error| error.name());
        let dropped = Dropped::ALL.iter().map(|reason| reason.name());
        for name in skips.chain(errors).chain(dropped).filter(|name| !name.is_empty()) {
            assert!(readme.contains(&format!("`{name}`")), "README does not explain \"{name}\"");
        }
    }
}
