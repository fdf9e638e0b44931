//! Messages between ranks at their rendezvous.

use moh_testkit::fuzz::Target;

use crate::ALLOCATOR;

#[test]
fn mutated_messages_are_read_or_refused() {
    let hello = br#"{"Hello":{"protocol":1,"job":"j","rank":1,"size":2,"place":"host 7","fingerprint":"f"}}"#;
    let welcome = br#"{"Welcome":{"who":"rank 0","payload":[1,2,255]}}"#;
    let framed = |text: &[u8]| [&(text.len() as u32).to_le_bytes(), text].concat();
    let target = Target {
        name: "rendezvous",
        seeds: &[framed(hello), framed(welcome), framed(br#""Alive""#)],
        memory: 16 << 20,
        allocator: &ALLOCATOR,
    };
    target.run(moh_comm::check_messages);
}
