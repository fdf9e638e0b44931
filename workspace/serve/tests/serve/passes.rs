//! The sequences that the passes of the engine compute.

use std::sync::Arc;
use std::time::Duration;

use moh_kernels::{Cpu, ElementType};
use moh_model::{BatchOptions, Sampling};
use moh_serve::engine::{
    Admission, Event, Events, Handle, Inbox, Limits, Request, Scheduler, queue,
};
use moh_testkit::programs::WORDS;

use crate::client::prepared;

/// Returns a greedy request for `max_tokens` tokens after a prompt of `length` tokens.
fn request(length: u32, max_tokens: usize) -> Request {
    Request {
        prompt: (0..length).map(|n| (n * n + length) % 30).collect(),
        max_tokens,
        sampling: Sampling::default(),
        seed: 0,
        end_tokens: Vec::new(),
        logprobs: Some(1),
        prompt_logprobs: None,
        heads: false,
        prompt_heads: false,
        streams: true,
        deadline: None,
    }
}

fn submit(handle: &Handle, requests: Vec<Request>) -> Vec<Events> {
    handle.submit(vec![requests]).unwrap().remove(0)
}

/// Returns the events of a sequence so far.
fn events(events: &mut Events) -> Vec<Event> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let mut found = Vec::new();
    runtime.block_on(async {
        while let Ok(Some(event)) = tokio::time::timeout(Duration::ZERO, events.next()).await {
            found.push(event);
        }
    });
    found
}

/// Computes a sequence to its end; returns its events and the number of passes.
fn finish(
    scheduler: &mut Scheduler<'_, Cpu>,
    inbox: &Inbox,
    sequence: &mut Events,
) -> (Vec<Event>, usize) {
    let mut all = Vec::new();
    for passes in 1..10_000 {
        scheduler.take(inbox, Duration::ZERO);
        scheduler.step(Admission::Open);
        all.extend(events(sequence));
        if matches!(all.last(), Some(Event::Finished(_) | Event::Failed(_))) {
            return (all, passes);
        }
    }
    panic!("the sequence does not end: {all:?}");
}

#[test]
fn a_short_prompt_is_answered_within_three_passes_whatever_waits() {
    let dir = prepared();
    let model =
        moh_program::models::load(Cpu, ElementType::F32, &dir.path().join("moh"), 64).unwrap();
    let start = |blocks| {
        let (handle, inbox) = queue(1000);
        let sizes =
            BatchOptions { pass_tokens: 16, block_length: 4, ..BatchOptions::for_tokens(4) };
        let limits = Limits { sequences: 8, prompt_tokens: 8 };
        let options = BatchOptions { blocks, ..sizes };
        let scheduler = Scheduler::new(&model, options, limits, WORDS, Arc::default()).unwrap();
        (handle, inbox, scheduler)
    };
    let (handle, inbox, mut scheduler) = start(128);
    let mut alone = submit(&handle, vec![request(7, 1)]);
    let (expected, _) = finish(&mut scheduler, &inbox, &mut alone[0]);
    for blocks in [128, 24] {
        for (streams, long, choices) in [(0, 60, 1), (2, 60, 1), (0, 60, 9), (2, 3, 9), (0, 20, 30)]
        {
            let (handle, inbox, mut scheduler) = start(blocks);
            let mut others = Vec::new();
            for _ in 0..streams {
                others.extend(submit(&handle, vec![request(2, 30)]));
            }
            if streams > 0 {
                scheduler.take(&inbox, Duration::ZERO);
                scheduler.step(Admission::Open);
            }
            for number in 0..20 {
                let answer = if long > 16 { 1 } else { 30 };
                others.extend(submit(&handle, vec![request(long - number % 2, answer); choices]));
            }
            // The others occupy all places and blocks that they can get.
            for _ in 0..5 {
                scheduler.take(&inbox, Duration::ZERO);
                scheduler.step(Admission::Open);
            }
            let mut short = submit(&handle, vec![request(7, 1)]);
            let case = format!("{blocks} {streams} {long} {choices}");
            if long > 16 {
                let (found, passes) = finish(&mut scheduler, &inbox, &mut short[0]);
                assert!(passes <= 3, "{case}: {passes} passes");
                assert_eq!(found, expected, "{case}");
            }
            // No sequence waits for ever.
            for other in &mut others {
                finish(&mut scheduler, &inbox, other);
            }
        }
    }
}
