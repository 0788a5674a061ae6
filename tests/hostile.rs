//! Requests that are made to cost: each ends in a named reason, and takes no more memory than a few
//! times its body.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use ngx_http_kvc_aware_module::prompt::{Endpoint, Limits, ModelSpec, Models};
use ngx_http_kvc_aware_module::types::Skip;

/// Counts what is allocated. A block that grows counts twice meanwhile, as it may be copied.
struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// The counts are of the whole process, so that tests take turns.
static TURN: Mutex<()> = Mutex::new(());

// SAFETY: the system's allocator does the work.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        PEAK.fetch_max(NOW.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        // SAFETY: the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Bytes of a body; less without optimization, which takes hundred times as long.
const LARGE: usize = if cfg!(debug_assertions) { 1 << 19 } else { 10 << 20 };
/// What a request may take, in bodies.
const BODIES: usize = 10;

fn list(item: &str) -> String {
    let items = vec![item; LARGE / (item.len() + 1)];
    format!("[{}]", items.join(","))
}

fn deep(open: &str, close: &str, levels: usize, inner: &str) -> String {
    [&open.repeat(levels), inner, &close.repeat(levels)].concat()
}

fn keys() -> String {
    let entries: Vec<String> = (0..LARGE / 10).map(|at| format!("\"{at:x}\":1")).collect();
    format!("{{{}}}", entries.join(","))
}

/// Fields of a chat request beside its model.
fn cases() -> Vec<(&'static str, String)> {
    let said = |name: &str, value: &str| {
        format!(r#""messages":[{{"role":"user","content":"a"}}],"{name}":{value}"#)
    };
    let tool = |parameters: &str| {
        format!(r#"[{{"type":"function","function":{{"name":"f","parameters":{parameters}}}}}]"#)
    };
    let kwarg = |value: &str| said("chat_template_kwargs", &format!(r#"{{"extra":{value}}}"#));
    let content = |content: &str| format!(r#""messages":[{{"role":"user","content":{content}}}]"#);
    let nested = deep("[", "]", LARGE / 2, "");
    vec![
        ("deep content", content(&nested)),
        ("deep field that nobody reads", said("x", &nested)),
        ("deep objects", said("x", &deep("{\"a\":", "}", LARGE / 6, "0"))),
        ("deep kwargs", kwarg(&nested)),
        ("deep tool", said("tools", &tool(&format!(r#"{{"a":{nested}}}"#)))),
        ("broad and deep kwargs", kwarg(&deep("[", "]", 100, &list("1")))),
        ("small tools", said("tools", &list(r#"{"function":{"name":"f"}}"#))),
        ("empty tools", said("tools", &list("{}"))),
        ("a tool of many keys", said("tools", &tool(&keys()))),
        ("a tool of empty lists", said("tools", &tool(&format!(r#"{{"a":{}}}"#, list("[]"))))),
        ("many kwargs", said("chat_template_kwargs", &keys())),
        ("a kwarg of many keys", kwarg(&keys())),
        ("small documents", said("documents", &list(r#"{"a":"b"}"#))),
    ]
}

#[test]
fn what_is_made_to_cost_is_skipped_before_it_does() {
    let _turn = TURN.lock();
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/t/models/tiny").into();
    let models =
        Models::new(vec![ModelSpec { name: "tiny".to_owned(), dir, ..ModelSpec::default() }]);
    models.load_all(|name, loaded| assert!(loaded.is_ok(), "{name}: {loaded:?}"));
    let limits = Limits { max_text: 4 << 20, deadline: None };
    for (name, fields) in cases() {
        let body = format!(r#"{{"model":"tiny",{fields}}}"#).into_bytes();
        let before = NOW.load(Relaxed);
        PEAK.store(before, Relaxed);
        let outcome = models.tokenize(Endpoint::Chat, &body, &limits, false, |_| ());
        let peak = PEAK.load(Relaxed) - before;
        println!(
            "{name}: {} bytes, {:.1} times in memory",
            body.len(),
            peak as f64 / body.len() as f64
        );
        assert_eq!(outcome.result, Err(Skip::Unsupported), "{name}");
        assert!(peak <= BODIES * body.len(), "{name}: {peak} bytes");
    }
}

/// What a template doubles again and again, however small the request is.
#[test]
fn a_doubling_loop_ends_before_it_takes_much() {
    let _turn = TURN.lock();
    const MOST: usize = 80 << 20;
    let template = std::env::temp_dir().join(format!("kvc-doubling-{}.jinja", std::process::id()));
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/t/models/tiny");
    let said = r#""messages":[{"role":"user","content":"a"}]"#;
    for step in ["n.x ~ n.x", "n.x + n.x", "[n.x, n.x]|join", "n.x|replace('a', 'aa')"] {
        let text = format!(
            "{{% set n = namespace(x=seed) %}}{{% for i in range(times) %}}{{% set n.x = {step} %}}{{% endfor %}}"
        );
        std::fs::write(&template, text).unwrap();
        let (name, dir) = ("tiny".to_owned(), dir.into());
        let template = Some(template.clone());
        let models = Models::new(vec![ModelSpec { name, dir, template, ..ModelSpec::default() }]);
        models.load_all(|name, loaded| assert!(loaded.is_ok(), "{name}: {loaded:?}"));
        let kwargs = r#""chat_template_kwargs":{"seed":"a","times":64}"#;
        let body = format!(r#"{{"model":"tiny",{said},{kwargs}}}"#).into_bytes();
        let limits = Limits { max_text: 4 << 20, deadline: None };
        let before = NOW.load(Relaxed);
        PEAK.store(before, Relaxed);
        let outcome = models.tokenize(Endpoint::Chat, &body, &limits, false, |_| ());
        let peak = PEAK.load(Relaxed) - before;
        println!("{step}: {peak} bytes");
        assert_eq!(outcome.result, Err(Skip::Deadline), "{step}");
        assert!(peak <= MOST, "{step}: {peak} bytes");
    }
    std::fs::remove_file(&template).unwrap();
}
