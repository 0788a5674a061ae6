//! Random scripts against the oracle.
#![forbid(unsafe_code)]

use proptest::prelude::*;

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
