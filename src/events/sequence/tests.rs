use super::*;

fn mark(seq: u64, digest: u64) -> Mark {
    Mark { seq, digest, timestamp: seq as f64 }
}

/// A sequence that applied 0..next with digests 100, 101, …
fn applied(next: u64) -> Sequence {
    let mut sequence = Sequence::default();
    for seq in 0..next {
        assert_eq!(sequence.live(mark(seq, 100 + seq), true), Live::Apply);
    }
    sequence
}

#[test]
fn in_order_applies_and_a_copy_does_not() {
    let mut sequence = applied(5);
    assert_eq!(sequence.live(mark(2, 102), true), Live::Duplicate);
    assert_eq!(sequence.live(mark(5, 105), true), Live::Apply);
    assert_eq!((sequence.next(), sequence.origin()), (6, 0));
}

#[test]
fn going_back_is_a_restart() {
    assert_eq!(applied(5).live(mark(0, 7), true), Live::Restart);
    assert_eq!(applied(5).live(mark(4, 7), false), Live::Restart);
    // Of what is older than what is remembered the time decides.
    let next = REMEMBERED as u64 + 5;
    let late = Mark { timestamp: next as f64, ..mark(4, 7) };
    assert_eq!(applied(next).live(late, true), Live::Restart);
    assert_eq!(applied(next).live(mark(4, 104), true), Live::Duplicate);
    assert_eq!(applied(next).live(mark(5, 105), true), Live::Duplicate);
    assert_eq!(applied(next).live(mark(5, 7), true), Live::Restart);
}

#[test]
fn one_message_causes_one_restart() {
    let mut sequence = applied(5);
    assert_eq!(sequence.live(mark(2, 7), true), Live::Restart);
    sequence.forget();
    assert_eq!(sequence.begin(true), Begin::Replay(0));
    for seq in 0..5 {
        assert_eq!(sequence.replayed(mark(seq, 100 + seq)), Replayed::Apply);
    }
    assert!(sequence.replay_ended());
    assert_eq!(sequence.live(mark(2, 7), true), Live::Duplicate);
}

#[test]
fn a_gap_is_asked_for_once() {
    let mut sequence = applied(5);
    assert_eq!(sequence.live(mark(7, 107), true), Live::Replay(4));
    assert_eq!(sequence.replayed(mark(4, 104)), Replayed::Skip);
    assert_eq!(sequence.replayed(mark(5, 105)), Replayed::Apply);
    assert_eq!(sequence.replayed(mark(6, 106)), Replayed::Apply);
    assert!(sequence.replay_ended());
    assert_eq!(sequence.live(mark(7, 107), true), Live::Apply);
    assert_eq!(sequence.live(mark(9, 109), true), Live::Replay(7));
    assert_eq!(sequence.replayed(mark(7, 107)), Replayed::Skip);
    assert!(sequence.replay_ended());
    assert_eq!(sequence.live(mark(9, 109), true), Live::Unfilled);
}

#[test]
fn without_replays_a_gap_begins_anew() {
    let mut sequence = applied(5);
    assert_eq!(sequence.live(mark(7, 107), false), Live::Adopt);
    assert_eq!((sequence.next(), sequence.origin()), (8, 7));
}

#[test]
fn a_replay_proves_continuity_or_not() {
    let mut proved = Sequence::resume(mark(4, 104), 0);
    assert_eq!(proved.begin(true), Begin::Replay(4));
    assert_eq!(proved.replayed(mark(4, 104)), Replayed::Skip);
    assert!(proved.replay_ended());

    let mut passed = Sequence::resume(mark(4, 104), 0);
    assert_eq!(passed.begin(true), Begin::Replay(4));
    assert_eq!(passed.replayed(mark(4, 7)), Replayed::Restart);

    let mut shorter = Sequence::resume(mark(4, 104), 0);
    assert_eq!(shorter.begin(true), Begin::Replay(4));
    assert!(!shorter.replay_ended());

    let mut rolled = Sequence::resume(mark(4, 104), 0);
    assert_eq!(rolled.begin(true), Begin::Replay(4));
    assert_eq!(rolled.replayed(mark(5, 105)), Replayed::Lost);

    assert_eq!(Sequence::resume(mark(4, 104), 0).begin(false), Begin::Clear);
}

#[test]
fn a_clock_that_goes_back_is_looked_into() {
    let mut sequence = applied(5);
    let back = Mark { seq: 5, digest: 7, timestamp: 1.0 };
    assert_eq!(sequence.live(back, true), Live::Replay(4));
    assert_eq!(sequence.replayed(mark(4, 104)), Replayed::Skip);
    assert!(sequence.replay_ended());
    assert_eq!(sequence.live(back, true), Live::Apply);
}

#[test]
fn a_replay_from_the_start_may_begin_late() {
    let mut sequence = Sequence::default();
    assert_eq!(sequence.begin(true), Begin::Replay(0));
    assert_eq!(sequence.replayed(mark(40, 1)), Replayed::Apply);
    assert_eq!(sequence.replayed(mark(41, 2)), Replayed::Apply);
    assert_eq!(sequence.replayed(mark(43, 3)), Replayed::Adopt);
    assert!(sequence.replay_ended());
    assert_eq!((sequence.next(), sequence.origin()), (44, 43));
}
