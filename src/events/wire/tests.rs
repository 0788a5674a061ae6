use std::borrow::Cow;

use serde_json::{Value, json};

use super::*;
use crate::blocks::Extra;
use crate::types::{EngineHash, Tier};

fn pack(value: &Value) -> Vec<u8> {
    rmp_serde::to_vec(value).unwrap()
}

fn only(event: Value) -> Result<KvEvent<'static>, Dropped> {
    let payload: &'static [u8] = pack(&json!([1.5, [event], 0])).leak();
    let mut batch = batch(payload).unwrap();
    assert_eq!(batch.events.len(), 1);
    batch.events.remove(0)
}

fn stored(event: Value) -> Stored<'static> {
    match only(event) {
        Ok(KvEvent::Stored(stored)) => stored,
        other => panic!("{other:?}"),
    }
}

fn map_event() -> Value {
    json!({"type": "BlockStored", "block_hashes": [11, 12], "parent_block_hash": 10,
           "token_ids": [1, 2, 3, 4], "block_size": 2, "lora_id": null, "medium": "GPU",
           "lora_name": null, "group_idx": 0, "kv_cache_spec_kind": "full_attention"})
}

#[test]
fn a_map_and_every_length_of_array_are_one_event() {
    let mut expected = stored(map_event());
    assert_eq!(expected.hashes, [EngineHash(11), EngineHash(12)]);
    assert_eq!(expected.parent, Some(EngineHash(10)));
    assert_eq!(expected.tokens, [1, 2, 3, 4]);
    assert_eq!((expected.block_size, expected.tier), (2, Tier::Gpu));
    assert_eq!((expected.attention, expected.group), (Attention::Full, Some(0)));
    let full = json!(["BlockStored", [11, 12], 10, [1, 2, 3, 4], 2, null, "GPU", null,
                      [null, null], 0, "full_attention", null, null, null, "s", {"more": [1]}]);
    assert_eq!(stored(full.clone()), expected);
    expected.attention = Attention::Unstated;
    expected.group = None;
    for length in [5, 6, 7, 8, 9] {
        let cut: Value = full.as_array().unwrap()[..length].to_vec().into();
        assert_eq!(stored(cut), expected, "{length} elements");
    }
}

#[test]
fn other_names_are_understood_and_claims_of_identity_ignored() {
    let event = stored(json!({"medium": "disk", "backend_id": "10.0.0.9", "seq_hashes": [-1, 7],
        "parent_hash": null, "token_ids": [5, 6], "block_size": 1, "event_type": "BlockStored"}));
    assert_eq!(event.hashes, [EngineHash(u64::MAX), EngineHash(7)]);
    assert_eq!((event.parent, event.tier), (None, Tier::Ssd));
}

#[test]
fn removals_and_clears_in_both_shapes() {
    let removed =
        |tier, group| Ok(KvEvent::Removed(Removed { hashes: vec![EngineHash(3)], tier, group }));
    assert_eq!(only(json!(["BlockRemoved", [3]])), removed(Tier::Gpu, None));
    assert_eq!(only(json!(["BlockRemoved", [3], "CPU", 2])), removed(Tier::Cpu, Some(2)));
    let map = json!({"type": "BlockRemoved", "block_hashes": [3], "medium": "EXTERNAL"});
    assert_eq!(only(map), removed(Tier::Remote, None));
    let far = json!({"type": "BlockRemoved", "block_hashes": [3], "medium": "STORAGE",
                     "locality": "REMOTE"});
    assert_eq!(only(far), removed(Tier::Remote, None));
    assert_eq!(only(json!(["AllBlocksCleared"])), Ok(KvEvent::Cleared));
    assert_eq!(only(json!({"type": "AllBlocksCleared"})), Ok(KvEvent::Cleared));
}

#[test]
fn bytes_fold_to_the_low_bits_of_the_engines_integer() {
    // ["BlockRemoved", [bin(10)]] by hand: the encoder above makes no binary.
    let mut payload = vec![0x92, 0xcb, 0x3f, 0xf8, 0, 0, 0, 0, 0, 0, 0x91, 0x92, 0xac];
    payload.extend(b"BlockRemoved");
    payload.extend([0x91, 0xc4, 10, 0xff, 0xff, 1, 2, 3, 4, 5, 6, 7, 8]);
    let batch = batch(&payload).unwrap();
    assert_eq!(batch.rank, None);
    let expected =
        Removed { hashes: vec![EngineHash(0x0102_0304_0506_0708)], tier: Tier::Gpu, group: None };
    assert_eq!(batch.events, [Ok(KvEvent::Removed(expected))]);
}

#[test]
fn extra_keys_are_told_apart() {
    let mut event = map_event();
    event["parent_block_hash"] = Value::Null;
    event["lora_name"] = json!("a");
    event["lora_id"] = json!(4);
    event["extra_keys"] = json!([["a", ["m1", -17], "salt"], ["a", ["m2", 3]]]);
    let first = stored(event.clone());
    assert_eq!(first.lora.as_deref(), Some("a"));
    let media = |hash, offset| Extra::Media { hash, offset };
    assert_eq!(first.extras[0], [media("m1", -17), Extra::Salt("salt")]);
    assert_eq!(first.extras[1], [media("m2", 3)]);
    // The adapter's name twice: a salt that happens to be the same text.
    event["extra_keys"] = json!([["a", "a"], ["a"]]);
    assert_eq!(stored(event.clone()).extras, [vec![Extra::Salt("a")], vec![]]);
    // After the first block of a prompt there is no salt.
    event["parent_block_hash"] = json!(9);
    event["extra_keys"] = json!([["a", "x"], null]);
    assert_eq!(stored(event.clone()).extras[0], [media("x", 0)]);
    event["extra_keys"] = json!([[true], null]);
    assert_eq!(stored(event.clone()).extras[0], [Extra::Embeds(&[0xc3])]);
    event["extra_keys"] = json!([null, null]);
    assert!(stored(event.clone()).extras.is_empty());
    event["extra_keys"] = json!([["a", "x"]]);
    assert_eq!(only(event), Err(Dropped::Shape));
}

#[test]
fn an_adapter_without_a_name_is_not_the_base_model() {
    let mut event = map_event();
    event["lora_id"] = json!(3);
    assert_eq!(stored(event.clone()).lora, Some(Cow::Borrowed("\0id=3")));
    event["lora_id"] = json!("uuid");
    assert_eq!(stored(event).lora, Some(Cow::Borrowed("\0id=uuid")));
}

#[test]
fn a_bad_event_leaves_its_neighbours() {
    let payload = pack(&json!([1, [
        ["BlockStored", "no list", null, [], 1],
        ["BlockPainted", [1], {"a": [[[]]]}],
        {"block_hashes": [1]},
        ["BlockRemoved", [1], "TAPE"],
        {"type": "BlockStored", "block_hashes": [1], "token_ids": [-1], "block_size": 1},
        17,
        ["AllBlocksCleared"],
    ]]));
    let batch = batch(&payload).unwrap();
    let expected = [
        Err(Dropped::BadEvent),
        Err(Dropped::UnknownEvent),
        Err(Dropped::BadEvent),
        Err(Dropped::UnknownMedium),
        Err(Dropped::BadEvent),
        Err(Dropped::BadEvent),
        Ok(KvEvent::Cleared),
    ];
    assert_eq!(batch.events, expected);
    assert_eq!((batch.timestamp, batch.rank), (1.0, None));
    assert_eq!(outline(&payload), Ok((1.0, None)));
    assert_eq!(outline(&pack(&json!([2.5, [["BlockStored"]], 3]))), Ok((2.5, Some(3))));
}

#[test]
fn what_is_no_batch_is_dropped() {
    for value in [json!({}), json!([]), json!([1.0]), json!(["x", []]), json!([1.0, {}])] {
        assert_eq!(batch(&pack(&value)), Err(Dropped::BadPayload), "{value}");
        assert_eq!(outline(&pack(&value)), Err(Dropped::BadPayload), "{value}");
    }
    assert_eq!(batch(b""), Err(Dropped::BadPayload));
    assert_eq!(batch(&[0x92, 0x01, 0x92, 0xc0]), Err(Dropped::BadPayload));
    assert_eq!(batch(&vec![0; MAX_PAYLOAD + 1]), Err(Dropped::TooLarge));
    let many = vec![Value::Null; MAX_EVENTS + 1];
    assert_eq!(batch(&pack(&json!([1.0, many]))), Err(Dropped::TooLarge));
}

#[test]
fn frames_of_both_framings() {
    let seq = 258u64.to_be_bytes();
    let end = [0xff; 8];
    let numbered = Numbered { seq: 258, payload: b"p" };
    assert_eq!(live(&[&b"topic"[..], &seq, b"p"]), Ok(numbered));
    assert_eq!(reply(&[&b""[..], b"topic", &seq, b"p"]), Ok(Reply::Batch(numbered)));
    assert_eq!(reply(&[&b""[..], &seq, b"p"]), Ok(Reply::Batch(numbered)));
    assert_eq!(reply(&[&b""[..], b"", &end, b""]), Ok(Reply::End));
    assert_eq!(reply(&[&b""[..], &end, b""]), Ok(Reply::End));
    for frames in [&[&b""[..], b"p"][..], &[b"", &seq[1..], b"p"], &[b"x", &seq, b"p"], &[]] {
        assert_eq!(reply(frames), Err(Dropped::BadFrames));
    }
    assert_eq!(live(&[&b""[..], &end, b"p"]), Err(Dropped::BadFrames));
    assert_eq!(live(&[&b""[..], &seq]), Err(Dropped::BadFrames));
    assert_eq!(live(&[&b""[..], &seq[..7], b""]), Err(Dropped::BadFrames));
    assert_eq!(replay_request(258), [vec![], seq.to_vec()]);
}
