//! Any message on an event or replay socket: events, or a reason to drop it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ngx_http_kvc_aware_module::events::wire;

fuzz_target!(|frames: Vec<Vec<u8>>| {
    let _ = wire::live(&frames);
    let _ = wire::reply(&frames);
    for frame in &frames {
        let _ = wire::outline(frame);
        if let Ok(batch) = wire::batch(frame) {
            for event in batch.events {
                let _ = event;
            }
        }
    }
});
