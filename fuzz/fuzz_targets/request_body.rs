//! Any body, on each endpoint: tokens or a named reason, never a panic. The first byte is the endpoint.
#![no_main]

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use libfuzzer_sys::fuzz_target;
use ngx_http_kvc_aware_module::prompt::{Endpoint, Limits, ModelSpec, Models};

const PATHS: [&str; 5] =
    ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/generate"];
const MAX_TEXT: usize = 1 << 16;

static MODELS: LazyLock<Models> = LazyLock::new(|| {
    let models = Models::new(vec![ModelSpec {
        name: "tiny".to_owned(),
        dir: concat!(env!("CARGO_MANIFEST_DIR"), "/../t/models/tiny").into(),
        ..ModelSpec::default()
    }]);
    models.load_all(|_, loaded| assert!(loaded.is_ok()));
    models
});

fuzz_target!(|bytes: &[u8]| {
    let Some((first, body)) = bytes.split_first() else { return };
    let Some(endpoint) = Endpoint::from_path(PATHS[usize::from(*first) % PATHS.len()]) else {
        panic!("an unknown path");
    };
    let deadline = Instant::now() + Duration::from_secs(1);
    let limits = Limits { max_text: MAX_TEXT, deadline: Some(deadline) };
    let outcome = MODELS.tokenize(endpoint, body, &limits, true, |_| ());
    if let Ok(tokens) = outcome.result {
        assert!(tokens.text.is_none_or(|text| text.len() <= MAX_TEXT));
    }
});
