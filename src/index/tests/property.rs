//! Random scripts against the oracle.
#![forbid(unsafe_code)]

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};

use super::oracle::{self, Oracle, SERVERS, assert_equal, lookup, op, overlap, path, step, tips};
use crate::index::{Index, Writer};
use crate::types::ServerId;

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn a_script_gives_what_the_oracle_says(ops in prop::collection::vec(op(true), 1..60)) {
        let words = oracle::words(12_000);
        Index::format(&words).unwrap();
        let (mut writer, _) = Writer::attach(&words).unwrap();
        let empty = writer.index().stats().used_bytes;
        let mut oracle = Oracle::default();
        for op in &ops {
            let (want, got) = step(op, &mut oracle, &mut writer);
            prop_assert_eq!(want, got, "{:?}", op);
            assert_equal(&oracle, &writer);
        }
        for server in 0..SERVERS {
            writer.clear(ServerId(server));
        }
        prop_assert_eq!(writer.index().stats().used_bytes, empty, "something leaked");
    }

    /// Without renames: a name that was evicted cannot tell that it moved.
    #[test]
    fn a_full_zone_never_says_more_than_the_oracle(
        ops in prop::collection::vec(op(false), 1..120),
        units in 8..14usize,
    ) {
        let words = oracle::words(oracle::words_of(units));
        Index::format(&words).unwrap();
        let (mut writer, _) = Writer::attach(&words).unwrap();
        let empty = writer.index().stats().used_bytes;
        let mut oracle = Oracle::default();
        for op in &ops {
            step(op, &mut oracle, &mut writer);
            let tiers = oracle.tiers();
            for tip in tips() {
                let path = path(tip);
                let got = lookup(&writer.index(), &path);
                for server in 0..SERVERS {
                    let (got, want) = (got[usize::from(server)], overlap(&tiers, server, &path));
                    prop_assert!(got.blocks <= want.blocks, "{server} on {tip}: {got:?} {want:?}");
                    prop_assert_eq!(got.tiers.iter().sum::<u32>(), got.blocks);
                }
            }
        }
        for server in 0..SERVERS {
            writer.clear(ServerId(server));
        }
        let stats = writer.index().stats();
        prop_assert_eq!((stats.blocks, stats.entries), (0, 0));
        prop_assert_eq!(stats.used_bytes, empty, "something leaked");
    }
}

/// One long script, where a case of the above is a short one. `KVC_RANDOM_EVENTS` (default 10,000)
/// and `KVC_RANDOM_SEED` are from the environment.
#[test]
fn random_events() {
    const SHARE: u64 = 16;
    let number = |name: &str, default: u64| {
        std::env::var(name).map_or(default, |value| value.parse().expect(name))
    };
    let (count, seed) = (number("KVC_RANDOM_EVENTS", 10_000), number("KVC_RANDOM_SEED", 1));
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let mut runner = TestRunner::new_with_rng(ProptestConfig::default(), rng);
    let strategy = op(true);
    let words = oracle::words(12_000);
    Index::format(&words).unwrap();
    let (mut writer, _) = Writer::attach(&words).unwrap();
    let empty = writer.index().stats().used_bytes;
    let mut oracle = Oracle::default();
    for at in 0..count {
        let op = strategy.new_tree(&mut runner).unwrap().current();
        let (want, got) = step(&op, &mut oracle, &mut writer);
        assert_eq!(want, got, "event {at} of seed {seed}: {op:?}");
        if at % SHARE == 0 || at + 1 == count {
            assert_equal(&oracle, &writer);
        }
    }
    for server in 0..SERVERS {
        writer.clear(ServerId(server));
    }
    assert_eq!(writer.index().stats().used_bytes, empty, "something leaked");
    println!("random events: {count}, differences: 0");
}
