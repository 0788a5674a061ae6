//! The subscriber against publishers on real sockets.

#![allow(clippy::unwrap_used)]

mod events_support;

use events_support::{Bench, End, Framing, Publisher};
use ngx_http_kvc_aware_module::events::Level;
use ngx_http_kvc_aware_module::shared::{Dropped, Mode, ServerError, ServerField};

const SIZE: u32 = 4;

/// Tokens of a prompt with `blocks` blocks and one more token; `seed` tells prompts apart.
fn prompt(seed: u32, blocks: u32) -> Vec<u32> {
    (0..blocks * SIZE + 1).map(|n| seed * 1000 + n).collect()
}

#[test]
fn a_late_subscriber_learns_all_from_the_replay_in_every_framing() {
    for framing in [Framing::WithTopic, Framing::WithoutTopic] {
        let mut engine = Publisher::start(framing);
        engine.store(&prompt(1, 3), SIZE);
        engine.store(&prompt(2, 5), SIZE);
        engine.remove(&prompt(2, 5), SIZE, 4);
        let bench = Bench::new();
        let server = bench.server("a:1", 0);
        let subscriber = bench.subscribe(&[bench.endpoint(server, &engine)]);
        bench.until("the replay is applied", || bench.next_seq(server) == 3);
        bench.until("mode events", || bench.row(server).mode() == Mode::Events);
        assert_eq!(bench.matched(server, SIZE, &prompt(1, 3)), 3);
        assert_eq!(bench.matched(server, SIZE, &prompt(2, 5)), 4);
        engine.store(&prompt(3, 2), SIZE);
        bench.until("a live batch", || bench.matched(server, SIZE, &prompt(3, 2)) == 2);
        let row = bench.row(server);
        assert_eq!(row.get(ServerField::BlockSize), u64::from(SIZE));
        assert_eq!(row.get(ServerField::Connected), 1);
        assert_eq!(row.error(), ServerError::None);
        assert_eq!(row.get(ServerField::Restarts), 0);
        assert_eq!(row.get(ServerField::Replays), 1);
        subscriber.stop();
        assert_eq!(bench.zone().lease().holder(), None);
    }
}

#[test]
fn a_gap_is_filled_in_order() {
    let mut engine = Publisher::start(Framing::WithTopic);
    let bench = Bench::new();
    let server = bench.server("a:1", 0);
    let _subscriber = bench.subscribe(&[bench.endpoint(server, &engine)]);
    bench.settle(server, &mut engine, SIZE);
    engine.lose(2);
    engine.store(&prompt(1, 3), SIZE);
    engine.remove(&prompt(1, 3), SIZE, 2);
    engine.store(&prompt(4, 2), SIZE);
    bench.until("the batch after the gap", || bench.matched(server, SIZE, &prompt(4, 2)) == 2);
    assert_eq!(bench.matched(server, SIZE, &prompt(1, 3)), 2);
    assert_eq!(bench.row(server).get(ServerField::Gaps), 1);
    assert_eq!(bench.row(server).mode(), Mode::Events);
    assert_eq!(bench.row(server).get(ServerField::Restarts), 0);
}

#[test]
fn a_gap_past_the_buffer_clears_and_warns() {
    let mut engine = Publisher::start(Framing::WithTopic);
    let bench = Bench::new();
    let server = bench.server("a:1", 0);
    let _subscriber = bench.subscribe(&[bench.endpoint(server, &engine)]);
    engine.store(&prompt(1, 3), SIZE);
    bench.settle(server, &mut engine, SIZE);
    engine.keep(1);
    engine.lose(2);
    engine.store(&prompt(2, 2), SIZE);
    engine.store(&prompt(3, 2), SIZE);
    engine.store(&prompt(4, 2), SIZE);
    bench.until("partial", || bench.row(server).mode() == Mode::Partial);
    bench.until("what the buffer has", || bench.matched(server, SIZE, &prompt(4, 2)) == 2);
    assert_eq!(bench.matched(server, SIZE, &prompt(1, 3)), 0);
    assert_eq!(bench.row(server).error(), ServerError::GapUnfilled);
    assert_eq!(bench.lines(Level::Warn, "buffer_steps"), 2);
    // A clear makes everything known again.
    engine.clear();
    bench.until("events", || bench.row(server).mode() == Mode::Events);
    assert_eq!(bench.matched(server, SIZE, &prompt(4, 2)), 0);
    assert_eq!(bench.row(server).error(), ServerError::None);
}

#[test]
fn a_restarted_engine_is_found_out_whatever_its_number() {
    for batches in [0, 3, 9] {
        let mut engine = Publisher::start(Framing::WithTopic);
        let bench = Bench::new();
        let server = bench.server("a:1", 0);
        let _subscriber = bench.subscribe(&[bench.endpoint(server, &engine)]);
        bench.settle(server, &mut engine, SIZE);
        for seed in 1..5 {
            engine.store(&prompt(seed, 2), SIZE);
        }
        bench.until("four prompts", || bench.matched(server, SIZE, &prompt(4, 2)) == 2);
        engine.restart(|engine| {
            for seed in 0..batches {
                engine.store(&prompt(20 + seed, 3), SIZE);
            }
        });
        bench.until("the restart", || bench.row(server).get(ServerField::Restarts) == 1);
        bench.settle(server, &mut engine, SIZE);
        for seed in 1..5 {
            assert_eq!(bench.matched(server, SIZE, &prompt(seed, 2)), 0, "{batches} batches");
        }
        for seed in 0..batches {
            assert_eq!(bench.matched(server, SIZE, &prompt(20 + seed, 3)), 3);
        }
        assert_eq!(bench.row(server).mode(), Mode::Events);
        assert_eq!(bench.lines(Level::Notice, "restarted"), 1);
    }
}

#[test]
fn a_broken_connection_to_the_same_engine_keeps_its_blocks() {
    let mut engine = Publisher::start(Framing::WithoutTopic);
    let bench = Bench::new();
    let server = bench.server("a:1", 0);
    let _subscriber = bench.subscribe(&[bench.endpoint(server, &engine)]);
    engine.store(&prompt(1, 3), SIZE);
    bench.settle(server, &mut engine, SIZE);
    // Not enough to learn everything again.
    engine.keep(2);
    engine.disconnect(|engine| engine.store(&prompt(2, 3), SIZE));
    bench.until("what was missed", || bench.matched(server, SIZE, &prompt(2, 3)) == 3);
    assert_eq!(bench.matched(server, SIZE, &prompt(1, 3)), 3);
    let row = bench.row(server);
    assert_eq!((row.get(ServerField::Restarts), row.mode()), (0, Mode::Events));
    assert_eq!(bench.lines(Level::Notice, "events disconnected"), 1);
    assert_eq!(bench.lines(Level::Notice, "events connected"), 2);
}

#[test]
fn two_subscribers_hand_over_and_nothing_is_lost() {
    let mut engine = Publisher::start(Framing::WithTopic);
    let bench = Bench::new();
    let server = bench.server("a:1", 0);
    let gone = bench.server("b:1", 0);
    let endpoints = [bench.endpoint(server, &engine)];
    let old = bench.subscribe(&endpoints);
    engine.store(&prompt(1, 3), SIZE);
    bench.settle(server, &mut engine, SIZE);
    // Enough to prove that nothing was missed, not to learn everything again.
    engine.keep(2);
    let other = bench.other_process();
    let new = bench.subscribe_as(&endpoints, other.id());
    bench.until("the lease", || bench.zone().lease().holder() == Some(other.id()));
    engine.store(&prompt(2, 3), SIZE);
    bench.until("what came later", || bench.matched(server, SIZE, &prompt(2, 3)) == 3);
    assert_eq!(bench.matched(server, SIZE, &prompt(1, 3)), 3);
    assert_eq!(bench.row(server).get(ServerField::Restarts), 0);
    assert_eq!(bench.zone().lease().generation(), 2);
    // The old one stays off while the new one lives.
    old.stop();
    assert_eq!(bench.zone().lease().holder(), Some(other.id()));
    new.stop();
    assert_eq!(bench.zone().lease().holder(), None);
    assert_eq!(bench.row(gone).address(), "b:1");
}

#[test]
fn without_replay_the_server_is_partial_and_a_gap_clears() {
    let mut engine = Publisher::start(Framing::WithTopic);
    engine.store(&prompt(1, 3), SIZE);
    let bench = Bench::new();
    let server = bench.server("a:1", 0);
    let mut endpoint = bench.endpoint(server, &engine);
    endpoint.replay = None;
    let _subscriber = bench.subscribe(&[endpoint]);
    bench.until("partial", || bench.row(server).mode() == Mode::Partial);
    bench.settle(server, &mut engine, SIZE);
    assert_eq!(bench.matched(server, SIZE, &prompt(1, 3)), 0);
    engine.store(&prompt(2, 3), SIZE);
    bench.until("live blocks", || bench.matched(server, SIZE, &prompt(2, 3)) == 3);
    // Its parent came before the subscriber did.
    engine.extend(&prompt(1, 5), SIZE, 3);
    bench.until("orphans", || bench.row(server).dropped(Dropped::Orphan) == 2);
    engine.lose(1);
    engine.store(&prompt(3, 3), SIZE);
    engine.store(&prompt(4, 3), SIZE);
    bench.until("after the gap", || bench.matched(server, SIZE, &prompt(4, 3)) == 3);
    assert_eq!(bench.matched(server, SIZE, &prompt(2, 3)), 0);
    assert_eq!(bench.row(server).get(ServerField::Gaps), 1);
}

#[test]
fn an_unanswered_replay_leaves_live_events() {
    let mut engine = Publisher::start(Framing::WithTopic);
    engine.end(End::Never);
    let bench = Bench::new();
    let server = bench.server("a:1", 0);
    let _subscriber = bench.subscribe(&[bench.endpoint(server, &engine)]);
    bench.until("the time-out", || bench.row(server).error() == ServerError::ReplayUnanswered);
    assert_eq!(bench.row(server).mode(), Mode::Partial);
    bench.settle(server, &mut engine, SIZE);
    engine.store(&prompt(2, 3), SIZE);
    bench.until("live blocks", || bench.matched(server, SIZE, &prompt(2, 3)) == 3);
    assert_eq!(bench.lines(Level::Warn, "not answered"), 1);
}

#[test]
fn a_wrong_block_size_is_one_error_and_no_credit() {
    let mut engine = Publisher::start(Framing::WithTopic);
    engine.store(&prompt(1, 3), SIZE);
    let bench = Bench::new();
    let server = bench.server("a:1", 0);
    let mut endpoint = bench.endpoint(server, &engine);
    endpoint.block_size = Some(16);
    let subscriber = bench.subscribe(std::slice::from_ref(&endpoint));
    bench.until("the error", || bench.row(server).error() == ServerError::BlockSize);
    engine.store(&prompt(2, 3), SIZE);
    bench.until("the second batch", || bench.next_seq(server) == 2);
    assert_eq!(bench.row(server).mode(), Mode::Approximate);
    assert_eq!(bench.matched(server, SIZE, &prompt(1, 3)), 0);
    assert_eq!(bench.row(server).get(ServerField::BlockSize), u64::from(SIZE));
    assert_eq!(bench.lines(Level::Error, "kvc_aware_block_size says 16"), 1);
    subscriber.stop();
    endpoint.block_size = Some(SIZE);
    let _right = bench.subscribe(&[endpoint]);
    bench.until("events", || bench.row(server).mode() == Mode::Events);
    assert_eq!(bench.matched(server, SIZE, &prompt(1, 3)), 3);
}

#[test]
fn garbage_is_counted_and_what_follows_still_counts() {
    let mut engine = Publisher::start(Framing::WithTopic);
    let bench = Bench::new();
    let server = bench.server("a:1", 0);
    let _subscriber = bench.subscribe(&[bench.endpoint(server, &engine)]);
    engine.store(&prompt(1, 3), SIZE);
    bench.settle(server, &mut engine, SIZE);
    engine.raw(&[b"", b"short", b"x"]);
    engine.raw(&[b"", &9u64.to_be_bytes(), b"\xc1"]);
    engine.raw(&[b"one"]);
    bench.until("bad frames", || bench.row(server).dropped(Dropped::BadFrames) == 2);
    bench.until("bad payload", || bench.row(server).dropped(Dropped::BadPayload) == 1);
    assert_eq!(bench.row(server).error(), ServerError::Garbage);
    engine.store(&prompt(2, 3), SIZE);
    bench.until("a good batch", || bench.matched(server, SIZE, &prompt(2, 3)) == 3);
    assert_eq!(bench.matched(server, SIZE, &prompt(1, 3)), 3);
    assert_eq!(bench.row(server).error(), ServerError::None);
    assert_eq!(bench.row(server).mode(), Mode::Events);
}

#[test]
fn addresses_that_do_not_work_are_named() {
    let http = events_support::http_server();
    let bench = Bench::new();
    let engine = Publisher::start(Framing::WithTopic);
    let expected = [
        (format!("tcp://127.0.0.1:{}", http.port()), ServerError::NotZmq),
        ("tcp://127.0.0.1:1".to_owned(), ServerError::NotConnected),
        ("nonsense".to_owned(), ServerError::BadAddress),
    ];
    let mut endpoints = Vec::new();
    for (n, (events, _)) in expected.iter().enumerate() {
        let mut endpoint = bench.endpoint(bench.server(&format!("a:{n}"), 0), &engine);
        endpoint.events = Some(events.clone());
        endpoint.replay = None;
        endpoints.push(endpoint);
    }
    let subscriber = bench.subscribe(&endpoints);
    for (endpoint, (events, error)) in endpoints.iter().zip(&expected) {
        bench.until(events, || bench.row(endpoint.id).error() == *error);
        assert_eq!(bench.row(endpoint.id).mode(), Mode::Approximate);
    }
    subscriber.stop();
}

#[test]
fn ranks_of_one_address_are_kept_apart() {
    let mut first = Publisher::start(Framing::WithTopic);
    let mut second = Publisher::start(Framing::WithTopic);
    second.rank(1);
    let bench = Bench::new();
    let (zero, one) = (bench.server("a:1", 0), bench.server("a:1", 1));
    let mut endpoints = [bench.endpoint(zero, &first), bench.endpoint(one, &second)];
    endpoints[1].rank = 1;
    let _subscriber = bench.subscribe(&endpoints);
    bench.settle(zero, &mut first, SIZE);
    bench.settle(one, &mut second, SIZE);
    first.store(&prompt(1, 3), SIZE);
    second.store(&prompt(2, 3), SIZE);
    bench.until("rank 0", || bench.matched(zero, SIZE, &prompt(1, 3)) == 3);
    bench.until("rank 1", || bench.matched(one, SIZE, &prompt(2, 3)) == 3);
    assert_eq!(bench.matched(one, SIZE, &prompt(1, 3)), 0);
    first.rank(1);
    first.store(&prompt(3, 3), SIZE);
    bench.until("the drop", || bench.row(zero).dropped(Dropped::Rank) > 0);
    assert_eq!(bench.matched(zero, SIZE, &prompt(3, 3)), 0);
}
