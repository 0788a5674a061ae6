//! Any message on an event or replay socket: events, or a reason to drop it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ngx_http_kvc_aware_module::events::wire;

fuzz_target!(|bytes: &[u8]| {
    let (sequence, payload) = bytes.split_at(bytes.len().min(8));
    let topic = b"topic".as_slice();
    let _ = wire::live(&[topic, sequence, payload]);
    let _ = wire::reply(&[&[], sequence, payload]);
    let _ = wire::reply(&[&[], topic, sequence, payload]);
    let outline = wire::outline(payload);
    let Ok(batch) = wire::batch(payload) else { return };
    for event in batch.events {
        let _ = event;
    }
    let said = outline.map(|(timestamp, rank)| (timestamp.to_bits(), rank));
    assert_eq!(said, Ok((batch.timestamp.to_bits(), batch.rank)));
});
