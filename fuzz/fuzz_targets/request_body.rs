//! Any body, on each endpoint: an answer or a named reason, never a panic, and in time.
#![no_main]

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use libfuzzer_sys::fuzz_target;
use ngx_http_kvc_aware_module::prompt::{Endpoint, Limits, ModelSpec, Models};

static MODELS: LazyLock<Models> = LazyLock::new(|| {
    let models = Models::new(vec![ModelSpec {
        name: "tiny".to_owned(),
        dir: concat!(env!("CARGO_MANIFEST_DIR"), "/../t/models/tiny").into(),
        ..ModelSpec::default()
    }]);
    models.load_all(|_, loaded| assert!(loaded.is_ok()));
    models
});

fuzz_target!(|body: &[u8]| {
    for path in ["/v1/chat/completions", "/v1/completions"] {
        let Some(endpoint) = Endpoint::from_path(path) else { continue };
        let start = Instant::now();
        let limits =
            Limits { max_text: 1 << 16, deadline: Some(start + Duration::from_millis(100)) };
        let _ = MODELS.tokenize(endpoint, body, &limits, false, |_| {});
        assert!(start.elapsed() < Duration::from_secs(2), "the deadline was not kept");
    }
});
