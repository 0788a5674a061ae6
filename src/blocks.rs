#![forbid(unsafe_code)]

/// The zone's secret that block hashes are keyed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HashKey(pub [u64; 2]);
